"""Decompositions in float64 that survive bad input, with fixed signs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from egop.distributed import Holding, rows_at, sum_at

# float64 copies of rows are made in slices of at most this size.
_SLICE_BYTES = 256 * 2**20

# Measured on an H200 (docs/performance-history.md): from which width on what is faster for narrow matrices is slower.
_WIDE = 1024  # many Cholesky decompositions in one call
_VERY_WIDE = 3072  # the inverse of a triangle

# An error of so many units in the last place is rounding.
ROUNDING = 4
# A null space with more dimensions than this is not decomposed.
_WIDE_NULL_SPACE = 2048


def fix_signs(vectors: Tensor) -> Tensor:
    """Rotate each column so that its largest entry is positive: a decomposition leaves the sign open, runs must repeat.

    Among entries that are equally large up to rounding the first one counts, so that rounding cannot flip a column.
    """
    sizes = vectors.abs()
    leading = (sizes >= sizes.amax(-2, keepdim=True) * (1 - 1e-6)).to(torch.uint8).argmax(-2, keepdim=True)
    signs = vectors.gather(-2, leading).sign()
    return vectors * torch.where(signs == 0, 1, signs)


def eigenbasis(matrix: Tensor, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues and eigenvectors (columns) of a positive semidefinite matrix, strongest first.

    Decompose in float64. Eigenvalues are not negative. Rounding decides neither signs nor directions without gradient.

    Args:
        matrix: the matrix.
        noise: how large an eigenvalue can be, relative to the first, and still be nothing but rounding; at least what
            the matrix's own precision leaves.
    """
    noise = max(noise, ROUNDING * torch.finfo(matrix.dtype).eps)
    matrix = _finite(matrix.double())
    values, vectors = _eigh((matrix + matrix.mT) / 2)
    values = values.clamp_min(0)
    return values, _orthonormal(fix_signs(_settle_null_space(values, vectors, noise)))


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose a positive semidefinite matrix, largest eigenvalue first.

    If the solver does not converge, try again with a shifted diagonal, then by SVD; both have the same eigenvectors.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:
        shift = matrix.diagonal().mean()
        try:
            shifted = matrix + shift * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
            values, vectors = torch.linalg.eigh(shifted)
            values = values - shift
        except torch.linalg.LinAlgError:
            vectors, values, _ = torch.linalg.svd(matrix)
            return values, vectors
    return values.flip(-1), vectors.flip(-1)


def eigenbasis_of_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenbasis of the mean of the rows' outer products, computed from the rows themselves.

    A QR decomposition comes first and leaves a triangle with as many rows and columns as there are rows (or
    dimensions, if these are fewer) for the SVD. For few rows this costs no more than the eigenvectors of their inner
    products, and unlike those it does not square the singular values, whose small ones would be lost.

    The basis is complete: directions that no row has come last, with eigenvalue zero.
    """
    noise = _noise_of_rows(rows.dtype)
    rows = _finite(rows.double())
    count, dimension = rows.shape
    try:
        if count < dimension:
            vectors, triangle = torch.linalg.qr(rows.mT, mode="complete")
            rotated, singular, _ = torch.linalg.svd(triangle[:count])
            vectors[:, :count] = vectors[:, :count] @ rotated
        else:
            _, singular, vectors = torch.linalg.svd(torch.linalg.qr(rows, mode="r").R)
            vectors = vectors.mT
    except torch.linalg.LinAlgError:
        return eigenbasis(rows.mT @ rows / count, noise)
    values = rows.new_zeros(dimension)
    values[: len(singular)] = singular.square() / count
    return values, _orthonormal(fix_signs(_settle_null_space(values, vectors, noise)))


def leading_eigenbasis(matrix: Tensor, rank: int) -> Tensor:
    """Return an orthonormal basis that begins with the strongest eigenvectors of a positive semidefinite matrix.

    A randomized range finder with two power iterations needs products with ``rank`` columns only, no decomposition of
    the matrix. The other directions are in no particular order.
    """
    noise = ROUNDING * torch.finfo(matrix.dtype).eps
    matrix = _finite(matrix.double())
    vectors = _fixed_normal(len(matrix), rank, matrix.device)
    for _ in range(3):
        vectors = orthonormalized(matrix @ vectors)
    values, rotated = torch.linalg.eigh(vectors.mT @ matrix @ vectors)
    leading = vectors @ rotated.flip(-1)[:, : _rank(values.flip(-1), noise)]
    return _orthonormal(fix_signs(torch.cat([leading, _complement(leading)], dim=1)))


def _noise_of_rows(dtype: torch.dtype) -> float:
    """Return how large an eigenvalue of outer products can be, relative to the first, by rounding of the rows alone."""
    return (ROUNDING * torch.finfo(dtype).eps) ** 2


def noise_floor(dtype: torch.dtype) -> float:
    """Return how small a gradient's entry in an eigenbasis can be, relative to the largest, before it is rounding.

    Directions without gradient are known only to about the rounding of the Gram matrix divided by its weakest
    eigenvalue, so gradients have traces of the weak directions there.
    """
    return min(math.sqrt(torch.finfo(dtype).eps), 1e-6)


def _rank(values: Tensor, noise: float) -> int:
    """Return how many of the descending eigenvalues are more than rounding."""
    return int((values > noise * values[0]).sum())


def _settle_null_space(values: Tensor, vectors: Tensor, noise: float) -> Tensor:
    """Choose the directions whose eigenvalues are zero up to rounding by a rule, so that rounding does not choose them.

    The rule: they diagonalize a fixed diagonal matrix within their span, so inputs that are always zero and dead units
    keep their own axes. The entries of the diagonal are powers of e, whose means never coincide and make new ties. A
    wide span is completed by the rule of :func:`_complement` instead, which needs no decomposition.
    """
    rank = _rank(values, noise)
    null = vectors[:, rank:]
    if null.shape[1] < 2:
        return vectors
    if null.shape[1] > _WIDE_NULL_SPACE:
        return torch.cat([vectors[:, :rank], _complement(vectors[:, :rank])], dim=1)
    size = len(vectors)
    diagonal = torch.arange(size, dtype=null.dtype, device=null.device).div(-size).exp()
    rotation = _eigh(null.mT @ (diagonal[:, None] * null))[1]
    return torch.cat([vectors[:, :rank], null @ rotation], dim=1)


def _complement(vectors: Tensor) -> Tensor:
    """Complete orthonormal columns U to a basis, by a rule that rounding does not change.

    E is a fixed frame and W the orthogonal factor of EᵀU. The reflection along U + EW takes -EW to U, and so the
    directions outside E to directions outside U. Householder's own completion would depend on the signs of entries that
    are zero up to rounding.
    """
    size, rank = vectors.shape
    frame = torch.linalg.qr(_fixed_normal(size, rank, vectors.device), mode="complete").Q
    inside, outside = frame[:, :rank], frame[:, rank:]
    left, _, right = torch.linalg.svd(inside.mT @ vectors)
    along = vectors + inside @ (left @ right)
    completion: Tensor = outside - along @ torch.linalg.solve(along.mT @ along / 2, along.mT @ outside)
    return completion


def _fixed_normal(rows: int, columns: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64, device="cpu").to(device)


class OuterProducts:
    """The mean outer product of rows that come in chunks: kept as rows while they are few, then as the matrix.

    The rows of one gradient are one draw, not many: they may all be alike. How much of the result is chance is told by
    how much one draw differs from another, so the squared norms of the draws' own matrices are added up too.

    Args:
        dimension: the length of a row.
        route: ``"eigh"`` adds up the matrix and decomposes it; ``"svd"`` keeps all rows and decomposes those;
            ``"auto"`` takes the second while there are fewer rows than dimensions.
    """

    def __init__(self, dimension: int, route: str = "auto") -> None:
        self.dimension = dimension
        self.route = route
        self.rows: list[Tensor] = []
        self.total: Tensor | None = None
        self.count = 0
        self.draws = 0
        self.noise = 0.0  # largest relative eigenvalue that the rounding of these rows can make
        self.fourth: Tensor | float = 0.0  # Σ ‖Gᵀ G‖² over the draws G; on the device, which is not waited for

    def add(self, rows: Tensor, draws: int | None = None) -> None:
        """Take in the rows of so many draws, as many of each and in order; every row is a draw by default."""
        draws = len(rows) if draws is None else draws
        if draws:
            self.draws += draws
            self.fourth = self.fourth + _squared_norms(rows.unflatten(0, (draws, -1)))
        self._keep(rows)

    def merge(self, other: OuterProducts) -> None:
        """Take in all that another one has seen."""
        count, draws, fourth = self.count + other.count, self.draws + other.draws, self.fourth + other.fourth
        for rows in other.rows:
            self._keep(rows)
        if other.total is not None:
            self._fold()
            self.total = other.total.clone() if self.total is None else self.total + other.total
        self.count, self.draws, self.fourth = count, draws, fourth

    def holding(self) -> Holding:
        """What this process has of the rows of all processes."""
        return Holding.of(self.count, self.rows, self.total is not None, self.draws, float(self.fourth))

    def prepare(self, holdings: Sequence[Holding], device: torch.device) -> None:
        """Make ready for :meth:`collect` what may fail; given what each process has, and where the result is wanted."""
        if any(holding.folded for holding in holdings) or self._is_enough(sum(holding.seen for holding in holdings)):
            self._fold()
            if self.total is None:
                self.total = torch.zeros(self.dimension, self.dimension, dtype=torch.float64, device=device)

    def collect(self, owner: int, holdings: Sequence[Holding], device: torch.device) -> None:
        """Bring what all processes have seen together in the owner's."""
        if self.total is not None:
            sum_at(owner, self.total)
        else:
            rows: list[Tensor] = []
            rows_at(owner, self.rows, holdings, device, rows.append)
            self.rows = rows
        self.count = sum(holding.seen for holding in holdings)
        self.draws = sum(holding.draws for holding in holdings)
        self.fourth = sum(holding.fourth for holding in holdings)

    def anisotropy(self, values: Tensor) -> tuple[float, float] | None:
        """How far the eigenvalues are from being all alike, and how much of that is not chance.

        ‖P‖² / (tr P)² − 1/d is zero for a flat spectrum. In the mean of M draws chance adds to ‖P‖² what each draw
        has with itself; what pairs of different draws have in common is the unbiased rest.

        Args:
            values: the eigenvalues of the mean outer product.

        Returns:
            The part that is not chance, which may be slightly negative, and the whole; None with fewer than two draws,
            or where there is nothing to tell apart.
        """
        trace = float(values.sum())
        if self.draws < 2 or not trace > 0:
            return None
        squares = float(values.square().sum()) / trace**2
        alone = float(self.fourth) / (self.count * trace) ** 2
        whole = squares - 1 / self.dimension
        if whole <= 1e-12:
            return None
        return (squares - alone) * self.draws / (self.draws - 1) - 1 / self.dimension, whole

    def eigenbasis(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of the mean outer product."""
        if self.total is None:
            return eigenbasis_of_rows(torch.cat(self.rows))
        return eigenbasis(self.total / self.count, self.noise)

    def _is_enough(self, count: int) -> bool:
        """Whether so many rows are better kept as the matrix."""
        return self.route == "eigh" or (self.route == "auto" and count >= self.dimension)

    def _keep(self, rows: Tensor) -> None:
        self.rows.append(rows)
        self.count += len(rows)
        self.noise = _noise_of_rows(rows.dtype)
        if self._is_enough(self.count) or self.total is not None:
            self._fold()

    def _fold(self) -> None:
        for rows in self.rows:
            if self.total is None:
                self.total = rows.new_zeros(self.dimension, self.dimension, dtype=torch.float64)
            # In float64: a float32 product buries eigenvalues below about 1e-8 of the first.
            for part in rows.split(max(1, _SLICE_BYTES // (8 * self.dimension))):
                self.total.addmm_(part.double().mT, part.double())
        self.rows.clear()


def _squared_norms(draws: Tensor) -> Tensor:
    """Σ ‖Gᵀ G‖² over matrices G, in float64; ‖Gᵀ G‖ = ‖G Gᵀ‖, so the smaller one is made."""
    _, rows, columns = draws.shape
    if rows == 1:
        return draws.double().square().sum(-1).square().sum()
    total = torch.zeros((), dtype=torch.float64, device=draws.device)
    for part in draws.split(max(1, _SLICE_BYTES // (8 * rows * columns))):
        matrices = part.double()
        total += (matrices @ matrices.mT if rows <= columns else matrices.mT @ matrices).square().sum()
    return total


def random_orthonormal(rows: int, columns: int, generator: torch.Generator, stack: Sequence[int] = ()) -> Tensor:
    """Orthonormal columns in a random direction (uniform by Haar measure), in float64; or a stack of such matrices."""
    normal = torch.randn(*stack, rows, columns, generator=generator, dtype=torch.float64, device=generator.device)
    vectors, triangle = torch.linalg.qr(normal)
    signed: Tensor = vectors * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return signed


def identity(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Unit matrices, a stack of them where there are more than two dimensions."""
    return torch.eye(*shape[-2:], dtype=dtype, device=device).expand(*shape).clone()


def orthonormality_error(vectors: Tensor) -> float:
    """The largest entry of ``|VᵀV − I|``."""
    gram = vectors.mT @ vectors
    return float((gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)).abs().max())


def _finite(matrix: Tensor) -> Tensor:
    if not torch.isfinite(matrix).all():
        raise torch.linalg.LinAlgError("The matrix to decompose has entries that are not finite.")
    return matrix


def _orthonormal(vectors: Tensor) -> Tensor:
    # A few random vectors there and back: all inner products would cost more than many a decomposition. An entry of
    # VᵀV − I that is too large shows in its row of (VᵀV − I) x, whose signs x leave a small chance of cancelling.
    signs = torch.randint(2, (vectors.shape[1], 8), generator=torch.Generator().manual_seed(0), device="cpu")
    probes = (2 * signs - 1).to(vectors)
    error = float((vectors.mT @ (vectors @ probes) - probes).abs().max())
    if not error < 1e-8:
        raise torch.linalg.LinAlgError(
            f"The decomposition gave vectors that are not orthonormal (error {error:.1e}). "
            "Gradients of extreme scale, or a faulty LAPACK build, are likely causes."
        )
    return vectors.contiguous()


def orthonormalized(matrices: Tensor) -> Tensor:
    """Gram-Schmidt of the columns, first to last: the Q of their QR decompositions with positive diagonals of R.

    Householder QR is slow on a GPU. Where float64 is fast there, Cholesky-QR does the same with matrix products: the
    columns are divided by R, twice, R being the Cholesky factor of their inner products. A shift makes the first
    division possible for columns that are nearly dependent, and the second one removes what it left.
    """
    if not _has_fast_float64(matrices.device):
        vectors, triangle = torch.linalg.qr(matrices)
        signs = triangle.diagonal(dim1=-2, dim2=-1).sign()
        signed: Tensor = vectors * torch.where(signs == 0, 1, signs).unsqueeze(-2)
        return signed
    return cholesky_qr(matrices)


def cholesky_qr(matrices: Tensor) -> Tensor:
    """The same by Cholesky decompositions in float64."""
    columns = matrices.double()
    columns = columns / torch.linalg.vector_norm(columns, dim=-2, keepdim=True).clamp_min(1e-300)
    shift = 10 * columns.shape[-2] * torch.finfo(torch.float64).eps  # above the rounding of an inner product
    for extra in (shift, 0.0):
        inner = columns.mT @ columns
        inner.diagonal(dim1=-2, dim2=-1).add_(extra)
        columns = _divided(columns, _cholesky(inner))
    return columns.to(matrices.dtype)


def _cholesky(matrices: Tensor) -> Tensor:
    """Cholesky factors; not finite where there are none: looking at that here would wait for the device.

    Wide matrices are taken one by one: the solver for many at once, made for small ones, takes twice as long for them.
    """
    if matrices.dim() > 2 and matrices.shape[-1] > _WIDE:
        return torch.stack([_cholesky(matrix) for matrix in matrices])
    lower: Tensor = torch.linalg.cholesky_ex(matrices)[0]
    return lower


def _divided(columns: Tensor, lower: Tensor) -> Tensor:
    """The columns divided by the transpose of a triangle: by its inverse, which is faster unless it is very wide."""
    if lower.shape[-1] > _VERY_WIDE:
        divided: Tensor = torch.linalg.solve_triangular(lower.mT, columns, upper=True, left=False)
        return divided
    return columns @ inverse_of_lower(lower).mT


def inverse_of_lower(lower: Tensor) -> Tensor:
    """The inverses of lower triangles, mostly by products: those of small triangles on the diagonal, then of pairs.

    The inverse of [[A, 0], [B, C]] is [[A⁻¹, 0], [-C⁻¹ B A⁻¹, C⁻¹]].
    """
    size = lower.shape[-1]
    doublings = max(0, math.ceil(math.log2(size / 32)))
    small = -(-size // 2**doublings)
    padded = lower.new_zeros(*lower.shape[:-2], small * 2**doublings, small * 2**doublings)
    padded[..., :size, :size] = lower
    padded.diagonal(dim1=-2, dim2=-1)[..., size:] = 1
    inverse = torch.zeros_like(padded)
    first = _on_diagonal(padded, small)
    ones = torch.eye(small, dtype=lower.dtype, device=lower.device).expand_as(first)
    _on_diagonal(inverse, small).copy_(torch.linalg.solve_triangular(first, ones, upper=False))
    for half in (small * 2**level for level in range(doublings)):
        corner = _on_diagonal(padded, 2 * half)[..., half:, :half]
        pairs = _on_diagonal(inverse, 2 * half)
        pairs[..., half:, :half] = -pairs[..., half:, half:] @ (corner @ pairs[..., :half, :half])
    return inverse[..., :size, :size]


def _on_diagonal(matrices: Tensor, size: int) -> Tensor:
    """The squares of some size along the diagonal, as views."""
    count = matrices.shape[-1] // size
    squares: Tensor = matrices.unflatten(-1, (count, size)).unflatten(-3, (count, size))
    return squares.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _has_fast_float64(device: torch.device) -> bool:
    """Data-centre GPUs (V100, A100, H100, B200) have a tenth or more of float32's rate in float64, others a 32nd."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in ((7, 0), (8, 0), (9, 0), (10, 0))


def near_one(matrices: Tensor) -> Tensor:
    """Divided by powers of two, which loses no bit, so that squares of their entries neither overflow nor vanish."""
    largest = torch.linalg.vector_norm(matrices, torch.inf, (-2, -1), keepdim=True)
    scale = (torch.frexp(largest).mantissa / largest).clamp_max(2.0**126)
    return matrices * torch.where(largest > 0, scale, 1)
