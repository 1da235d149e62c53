"""Programs that are started by hand, since they take minutes to hours: fuzzers (random configs,
command lines, checkpoints, published models, tokenizers), rehearsals under Slurm and Ray, and every
command of the documents. Their own tests stand beside them and run a few of their cases."""
