"""When each op of a table starts and ends on each stage, by two clocks.

    times.py         the times of ops, and timed ops: begin here
    events.py        what both clocks time: cells, and the ops that columns of the table name
    coupled.py       ticks as this runtime executes them, where a permute couples neighbours
    independent.py   stages that wait only for messages, as papers on schedules assume

No JAX here.
"""
