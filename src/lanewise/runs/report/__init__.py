"""Shows what runs left in their folders: a table of runs, and a page with charts."""
