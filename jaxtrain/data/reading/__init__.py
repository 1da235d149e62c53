"""Files of every format → documents: the formats, compressed files, records that cannot be read."""
