"""Expert parallelism: tokens go to the devices that hold the experts they chose, and return.

The `expert` axis splits the experts, and the batch in all other layers; `model` splits the columns
of each expert. A token's choice of an expert is a row of the matrix that the expert multiplies. A
dispatch sends these rows in one of three ways:

    dropless    by a ragged all-to-all of exactly the chosen rows. A device sorts the rows that it
                receives by expert, and multiplies each group of rows with its expert. It has memory
                for all choices that can fall on it: for each token of all devices, the smaller of
                the token's choices and the device's experts. With `expert_room` it has memory for
                that multiple of the mean. Then the largest groups (one device's rows for one
                expert) are cut to a size at which all fit, and the last rows of such a group are
                dropped. XLA's CPU backend has no ragged all-to-all: a plain one sends the most rows
                that can arrive, from each device to each
    two steps   dropless, for an axis that spans `expert_nodes` nodes, between which links are slow
                (DeepSeek-V3, arXiv:2412.19437, section 3.2.2). A token is a row for each node in
                which it has a choice, not for each choice. The row goes to its gateway, the device
                of the node that has the sender's position in its own node. From there a row for
                each of its choices goes to an expert of the node. On the way back the gateway adds
                up the results of a token. With `expert_room` a gateway, too, has memory for that
                multiple of the mean number of rows that it sends, and cuts its largest groups first
    capacity    by a plain all-to-all of a fixed number of positions for each expert and sequence;
                the last choices of a sequence for a full expert are dropped

The way of a token, which models/moe.py goes from top to bottom:

    exchange_group.py      the devices that have an expert, and those that exchange rows; tokens
                           gathered over `model`, and the results added up and split again
    routing.py             index code without communication, with an example of eight tokens: the
                           position of each row when it is sent, when it arrives, and by expert
    routing_collectives.py how devices agree on the numbers of rows that this index code needs
    expert_messages.py     the collectives that move rows, on one device's part
    dispatch.py            the same with gradients: tokens to experts, and results back
    products.py            rows times their experts' matrices, by grouped.py or megablox.py
    activation.py          the activation and the choices' weights, by filled_rows.py

Arrays that are split over `model` have a leading dimension for it, [M, …], with one part on each
device. The experts' results in them are terms of a sum. Inside the runtime's manual region experts
are split over `expert`; elsewhere a device has all of them.

Shape suffixes: M parts over model, B batch, T tokens, K choices of a token, D width, E experts of a
device, S positions of sent rows, R rows of a device's experts.
"""
