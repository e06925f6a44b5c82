"""What each engine does with a head: tables with version ranges, and the rules that read them."""
