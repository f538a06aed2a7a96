"""How the matrices that Muon orthogonalises lie on the ranks: whole, or rows of them on each rank of a group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from schemas.errors import UnsupportedError
from train.parallel.loading import local_part


@dataclass(frozen=True, eq=False)
class Matrices:
    """Of one parameter, those that this rank has rows of. group_options: the parameter's group of the optimizer; count:
    matrices [rows, columns]; blocks: of rows of each, which are orthogonalised alone; held: rows of every matrix on
    each rank of the group, (rows,) without one, where all are whole here."""

    name: str
    parameter: Tensor
    options: dict[str, Any]
    count: int
    rows: int
    columns: int
    blocks: int = 1
    held: tuple[int, ...] = ()
    group: ProcessGroup | None = None

    @classmethod
    def of(cls, name: str, parameter: Tensor, options: dict[str, Any], blocks: int = 1) -> Matrices:
        """Of a matrix [M, K] or a stack of them [E, M, K], sharded over E or M. UnsupportedError: another layout."""
        rows, columns = parameter.shape[-2:]
        count = local_part(parameter).shape[0] if parameter.ndim == 3 else 1
        made = cls(name, parameter, options, count, rows, columns, blocks, (rows,))
        row_dim = parameter.ndim - 2
        found = [(mesh_dim, dim) for mesh_dim, dim in _sharded(parameter) if not (parameter.ndim == 3 and dim == 0)]
        if found:
            if len(found) > 1 or found[0][1] != row_dim:
                raise UnsupportedError(f"Muon: {name} is placed as {parameter.placements}, not in rows of one group")  # type: ignore[attr-defined]
            mesh = parameter.device_mesh  # type: ignore[attr-defined]
            held = _chunks(rows, mesh.size(found[0][0]))
            made = replace(made, held=held, group=mesh.get_group(found[0][0]))
        return made._without_exchange()

    def _without_exchange(self) -> Matrices:
        """Blocks that no rank shares with another are matrices of their own."""
        block = self.rows // self.blocks
        if self.group is None or not any(held % block for held in self.held):
            mine = self.held[self.rank] // block * self.count
            return replace(self, count=mine, rows=block, blocks=1, held=(block,), group=None)
        return self

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return 0 if self.group is None else self.group.rank()

    @property
    def ranks(self) -> int:
        return len(self.held)

    @property
    def block_shape(self) -> tuple[int, int]:
        """Of what is orthogonalised."""
        return self.rows // self.blocks, self.columns

    def part(self, tensor: Tensor) -> Tensor:
        """[count, rows held here, columns] of a tensor placed as the parameter, sharing its memory where it can."""
        local = local_part(tensor)
        return local.reshape(self.count, self.held[self.rank], self.columns)


def _sharded(parameter: Tensor) -> list[tuple[int, int]]:
    """(dimension of the mesh, dimension of the tensor) that it shards among more than one rank."""
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    placed = enumerate(parameter.placements)
    return [(number, at.dim) for number, at in placed if isinstance(at, Shard) and mesh.size(number) > 1]


def _chunks(size: int, ranks: int) -> tuple[int, ...]:
    """As torch.chunk divides: all but the last ones are equal."""
    chunk = -(-size // ranks)
    return tuple(max(0, min(size, (rank + 1) * chunk) - rank * chunk) for rank in range(ranks))
