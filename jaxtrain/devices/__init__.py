"""The mesh, shardings by logical axes, and the processes of a cluster."""
