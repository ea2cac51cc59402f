"""What compiled programs compute, counted for ``scripts.check_ledger``."""
