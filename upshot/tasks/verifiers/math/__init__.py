"""Are two answers the same value? Reading LaTeX and comparing, without running a computer algebra system first."""
