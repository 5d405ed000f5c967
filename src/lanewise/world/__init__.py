"""Who this process is among all, and how it talks to the others. Import from the submodules."""
