"""The search for the best layout, and predictions of one layout's time and memory."""
