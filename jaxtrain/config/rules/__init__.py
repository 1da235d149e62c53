"""Rules between settings: what each says, the order in which they are checked, settings without
use, and what a run that resumes may change. No jax."""
