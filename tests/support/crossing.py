"""What crosses the `replica` axis in a compiled program: the collectives in which replicas meet,
and their bytes."""

from jax.sharding import Mesh

from jaxtrain.devices.mesh import REPLICA
from jaxtrain.planner.layer.links import sent
from jaxtrain.planner.programs.program import Instruction, Program, along


def across(program: Program, mesh: Mesh) -> list[Instruction]:
    """Collectives with devices of several replicas, wherever they stand in the program."""
    return [
        i
        for i in program.below(program.entry)
        if i.collective and REPLICA in along(i, mesh.shape)[0]
    ]


def bytes_sent(program: Program, mesh: Mesh) -> int:
    """Bytes that a device sends in a run of the program, in collectives across replicas, as rings
    of their groups do them. ValueError for one that stands in a loop."""
    found = across(program, mesh)
    if {i.name for i in found} - {i.name for i in program.inline(program.entry)}:
        raise ValueError("a collective across replicas stands in a loop")
    return round(sum(sent(i.collective or "", i.bytes, along(i, mesh.shape)[1]) for i in found))
