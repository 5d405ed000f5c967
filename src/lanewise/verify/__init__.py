"""Proves on the user's own model and data that N devices compute what one computes, or says why not."""
