"""The runtime, which runs a table on devices: a scan over its ticks inside one shard_map."""
