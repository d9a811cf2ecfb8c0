"""Several server processes behind one port."""
