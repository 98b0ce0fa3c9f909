"""How the threads of a CUDA row kernel share rows: pure functions of the row length.

A thread holds `packs` loads of 16 bytes, or of one element where alignment allows no more. A short
row belongs to a group of lanes, a longer one to a team of warps or a block, and one that no block
holds to a cluster of blocks. `Plan` says which, in the words of include/tilewright/reduce.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.gpu import Gpu

WARP = 32
GROUP_THREADS = 128  # of a block whose rows belong to groups of lanes
MAX_CLUSTER = 16  # blocks; more than 8 only where PORTABLE_CLUSTER is not the limit
PORTABLE_CLUSTER = 8
PACK_BYTES = 16
MAX_WARPS = 32  # of a block
MAX_TEAMS = 15  # of a block: each has a barrier of its own, and the block has one
LINE = 128  # bytes
WIDEST = 262_144  # columns that the kernels are meant for; no binary of longer ones is tested


@dataclass(frozen=True)
class Plan:
    owner: str  # of a row: "GROUP", "TEAM", "BLOCK" or "CLUSTER"
    vec: int  # elements per load
    packs: int  # loads that hold a thread's share of a row
    lanes: int  # threads of a block that share a row
    threads: int  # of a block
    cluster: int = 1  # blocks that share a row

    @property
    def rows(self) -> int:
        """Rows that a block owns at a time."""
        return self.threads // self.lanes

    @property
    def compiled_for(self) -> int:
        """Threads that a binary allows which leaves its registers to the compiler."""
        if self.owner == "GROUP":
            return GROUP_THREADS
        return 512 if self.threads <= 512 else 1024

    def grid(self, count: int) -> int:
        """Blocks of a grid that owns all of `count` rows at once."""
        return ceil(count, self.rows) * self.cluster

    def shared(self, operands: int, stages: int = 1) -> int:
        """Bytes of shared memory that hold the packs of a block."""
        return stages * operands * self.packs * self.threads * PACK_BYTES


@dataclass(frozen=True)
class Launch:
    """A plan, and the binary that serves it."""

    plan: Plan
    threads: int  # that a block may have
    blocks: int  # that an SM shall have registers for
    stages: int = 0  # sets of rows under way in a kernel that walks; 0: it does not
    at_once: int = 0  # rows in a set, reduced together; 0: one, and the kernel knows no other
    waves: int = 1  # how often the grid of a kernel that walks fills the GPU; 0: a row for each
    aside: bool = False  # a sum over rows, of floats, is in shared memory instead of registers

    @property
    def template(self) -> tuple[str | int, ...]:
        """The parameters of the kernel's template, after type and width."""
        walk = [number for number in (self.at_once, self.stages) if number]
        aside = ["true"] if self.aside else []
        return (self.plan.packs, self.plan.owner, *walk, self.threads, self.blocks, *aside)

    def grid(self, count: int) -> int:
        """Blocks of a grid that owns all of `count` rows at once."""
        return self.plan.grid(ceil(count, self.at_once or 1))

    def shared(self, operands: int, held: int = 0) -> int:
        """Bytes of the rows under way, of those that stay (`held`), and of a sum aside.

        No row is under way where a kernel reads element by element.
        """
        under_way = operands * (self.at_once or 1) * self.stages if self.plan.vec > 1 else 0
        aside = self.plan.vec * 4 // PACK_BYTES if self.aside else 0
        return self.plan.shared(under_way + held + aside)

    def fits(self, gpu: Gpu, operands: int, values: int, held: int = 0) -> bool:
        """Whether a block of this GPU has the shared memory for it.

        `values` of each row are reduced together; `held` rows stay there besides those under way.
        """
        room = gpu.shared_per_block - exchange_bytes(values * (self.at_once or 1))
        return self.shared(operands, held) <= room


@dataclass(frozen=True)
class Walk:
    """A binary of a kernel that walks, and what it is for: as in `Launch`, before n is known."""

    packs: int
    threads: int  # of a block, at most
    blocks: int
    stages: int
    cluster: int = 1  # blocks that share a row, at most
    at_once: int = 0
    waves: int = 1
    aside: bool = False
    full: bool = False  # only for rows that leave hardly a thread idle

    def launch(self, n: int, vec: int, gpu: Gpu) -> Launch | None:
        """For rows of n columns, or None if it is not for them."""
        if self.cluster == 1:
            plan = block(n, vec, self.packs, self.threads)
        else:
            plan = cluster(n, vec, self.packs, self.threads, self.threads, gpu)
        if plan is None or plan.cluster > self.cluster:
            return None
        if self.full and n * 16 < vec * self.packs * self.threads * self.cluster * 15:
            return None
        walk = self.stages, self.at_once, self.waves, self.aside
        return Launch(plan, self.threads, self.blocks, *walk)


def first_that_fits(
    walks: tuple[Walk, ...],
    n: int,
    vec: int,
    gpu: Gpu,
    *,
    operands: int,
    values: int,
    held: int = 0,
) -> Launch | None:
    """The first that is for n columns and fits a block of this GPU, as `Launch.fits` says."""
    found = (walk.launch(n, vec, gpu) for walk in walks)
    return next((each for each in found if each and each.fits(gpu, operands, values, held)), None)


def ceil(total: int, each: int) -> int:
    return -(-total // each)


def power_of_two(n: int) -> int:
    """The smallest one that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def group(n: int, vec: int, packs: int) -> Plan | None:
    """A group of lanes for each row, or None if a warp is too small."""
    lanes = power_of_two(ceil(n, vec * packs))
    return Plan("GROUP", vec, packs, lanes, GROUP_THREADS) if lanes <= WARP else None


def block(n: int, vec: int, packs: int, most: int) -> Plan | None:
    """A block of up to `most` threads for each row, or None."""
    threads = WARP * ceil(n, vec * packs * WARP)
    return Plan("BLOCK", vec, packs, threads, threads) if threads <= most else None


def teams(n: int, vec: int, packs: int, most: int) -> Plan | None:
    """As many teams of warps as a block of `most` threads has room for, a row for each."""
    alone = block(n, vec, packs, most)
    if alone is None or most // alone.threads < 2:
        return alone
    count = min(most // alone.lanes, MAX_TEAMS)
    return Plan("TEAM", vec, packs, alone.lanes, count * alone.lanes)


def full_teams(n: int, vec: int, most: int) -> Plan | None:
    """At least two teams, of two packs a thread if that leaves hardly one idle, else of three."""
    two, three = teams(n, vec, 2, most), teams(n, vec, 3, most)
    plan = two if two and two.rows * n * 8 > vec * 2 * most * 7 else three
    return plan if plan and plan.owner == "TEAM" else None


def cluster(n: int, vec: int, packs: int, threads: int, most: int, gpu: Gpu) -> Plan | None:
    """The fewest blocks, about `threads` each and `most` at the worst, that hold a row together."""
    wanted = max(2, power_of_two(ceil(n, vec * packs * threads)))
    blocks = min(wanted, largest_cluster(gpu))
    each = WARP * ceil(n, vec * packs * WARP * blocks)
    if blocks < 2 or each > most:
        return None
    return Plan("CLUSTER", vec, packs, each, each, blocks)


def largest_cluster(gpu: Gpu) -> int:
    """Blocks in a cluster: 16 on data-centre GPUs, 8 on others that have clusters, or 1."""
    if not gpu.arch.clusters:
        return 1
    return MAX_CLUSTER if gpu.sm in (90, 100) else PORTABLE_CLUSTER


def fits(plan: Plan | None, gpu: Gpu, operands: int, stages: int = 1) -> Plan | None:
    """The plan, if a block of this GPU has the shared memory for it."""
    room = gpu.shared_per_block - exchange_bytes(1)
    return plan if plan is not None and plan.shared(operands, stages) <= room else None


def exchange_bytes(values: int) -> int:
    """Of `Exchange` in reduce.cuh, for as many values as are reduced together, in whole lines."""
    return LINE * ceil(4 * values * 2 * (MAX_WARPS + MAX_CLUSTER) + 16, LINE)


def too_wide(n: int, vec: int, gpu: Gpu) -> str:
    """Why there is no plan."""
    how = "in loads of 16 bytes" if vec > 1 else "element by element, for alignment allows no more"
    return f"{n} columns, read {how}, are more than its blocks hold on SM {gpu.sm}"
