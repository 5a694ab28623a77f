"""An explanation by a language model, off by default. It adds words to a verdict, and decides nothing."""
