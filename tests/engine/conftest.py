"""The engine over fused kernels runs in Triton's interpreter here, as the kernels' own tests do."""

import tests.kernels.conftest  # noqa: F401
