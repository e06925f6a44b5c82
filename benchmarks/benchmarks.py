"""Makes way for the package of this name where a script is started by its path.

`python benchmarks/decode.py` searches this folder and not the one above, so that `import benchmarks` finds this file.
It puts the project's folder in place of this one and hands over the package, as `python -m benchmarks.decode` finds it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

sys.path[:] = [str(HERE.parent), *(p for p in sys.path if Path(p).resolve() != HERE)]
del sys.modules[__name__]
importlib.import_module(__name__)
