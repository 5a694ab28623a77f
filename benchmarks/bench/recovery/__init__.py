"""How long training stands still after a fault: the same script and fault under each launcher."""
