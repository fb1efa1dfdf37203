"""Each figure, table, algorithm and statement of the paper, in its order: where it is here, and what is missing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Statement:
    """One label of the paper.

    Attributes:
        label: its label in the paper's LaTeX; for a statement without one, its kind and section.
        kind: figure, table, algorithm, theorem, lemma, corollary or assumption.
        about: what it says, in short.
        where: ids of experiments, names of ``egop`` and ``egop_lab.theory``, and tests as ``file::function``.
        verdict: our verdict; experiments have theirs from their records.
        missing: sentences on what is missing or different here, and why.
    """

    label: str
    kind: str
    about: str
    where: tuple[str, ...]
    verdict: str = ""
    missing: tuple[str, ...] = ()


_BOUNDS = "lab/tests/theory/test_bounds.py::test_"
_BALL = "lab/tests/theory/test_ball_adagrad.py::test_"
_CLOSED = "lab/tests/theory/test_closed_forms.py::test_"
_CONVERGENCE = "lab/tests/theory/test_convergence.py::test_"
_IMAGENET = (
    "The residual networks are not trained on ImageNet for 40 epochs, which takes hours a run, but on Imagenette's "
    "9,469 images at 96 pixels and for fewer epochs. Orders and ratios can be compared, hours and losses cannot."
)
_OTHER_SETS = (
    "The optimizer stays in a ball or, with an infinite radius, anywhere. Boxes are in a test only: projecting in "
    "Adagrad's metric is a programme of its own for every kind of set."
)
_TEST_ONLY = "A test only: there is nothing in it to compute."


def _figure(label: str, about: str, *experiments: str, missing: tuple[str, ...] = ()) -> Statement:
    return Statement(f"fig:{label}", "figure", about, experiments, missing=missing)


STATEMENTS: tuple[Statement, ...] = (
    _figure("opener-cartoon", "Adagrad in the plane; the digits network's loss by epoch", "trajectories", "digits"),
    Statement(
        "fig:LRMF",
        "figure",
        "low-rank matrix factorisation, whose Hessian blocks are Kronecker products",
        (
            "matrix-factorization",
            "egop_lab.theory.matrix_factorization_blocks",
            f"{_CLOSED}the_hessian_blocks_of_low_rank_matrix_factorisation_are_kronecker_products",
        ),
        "The blocks are Kronecker products.",
    ),
    Statement(
        "alg:meta-algorithm-block",
        "algorithm",
        "reparameterisation by the EGOP eigenbasis",
        (
            "egop.estimate",
            "egop.ReparameterizedOptimizer",
            "tests/optimizer/test_equivalence.py::test_training_equals_training_on_explicit_coordinates",
        ),
        "Equal to the literal f∘V.",
    ),
    Statement(
        "assumption:rho-and-Theta",
        "assumption",
        "rho is isotropic within a convex set that holds the minimum",
        (f"{_BOUNDS}the_settings_satisfy_the_assumptions",),
        "True in the problems of the tests.",
    ),
    Statement(
        "assumption:H-Lipschitz",
        "assumption",
        "the Hessian changes slowly",
        (
            "egop_lab.theory.largest_hessian_lipschitz",
            "egop_lab.theory.needed_delta",
            f"{_BOUNDS}assumption_2_and_the_delta_it_needs_are_inverse",
        ),
        "True in the problems of the tests, for a small rho where they are not quadratic.",
    ),
    Statement(
        "lemma:convex-cvgnce-ball-version",
        "theorem",
        "regret of Adagrad on a ball",
        (
            "egop_lab.theory.regret_bound",
            f"{_BOUNDS}the_averaged_regret_of_constrained_adagrad_is_below_theorem_1_in_both_coordinates",
        ),
        "Holds, with a leading term of 2 sr/(dβ₁).",
    ),
    _figure("tinyMNIST-global-spectral-decay", "EGOP eigenvalues of the digits network", "digits-spectrum"),
    _figure("linear-layers-global-reparam-loss-vs-epochs", "training loss by epoch", "linear-networks"),
    _figure("linear-layers-global-reparam-loss-vs-LR", "training loss by learning rate", "linear-networks"),
    _figure("linear-layers-global-reparam-valloss-vs-LR", "validation loss by learning rate", "linear-networks"),
    _figure("global-reparam-linear-layers", "linear networks, all three", "linear-networks"),
    Statement(
        "fig:EIV",
        "figure",
        "errors in variables, by the Kronecker residual",
        (
            "errors-in-variables",
            "egop_lab.theory.kronecker_residual",
            f"{_CLOSED}the_kronecker_residual_is_that_of_alternating_least_squares",
        ),
    ),
    _figure("fashionMNIST", "auxiliary variables on Fashion-MNIST: loss and spectrum", "fashion-mnist"),
    Statement(
        "table:wallclock-time", "table", "epochs and hours to a validation loss", ("resnet",), missing=(_IMAGENET,)
    ),
    _figure("new-resnet-fig-plus-table", "residual networks, loss by epoch", "resnet", missing=(_IMAGENET,)),
    Statement(
        "alg:Adagrad",
        "algorithm",
        "Adagrad with and without a set to stay in",
        (
            "egop_lab.theory.BallConstrainedAdagrad",
            "lab/tests/theory/test_ball_adagrad.py::test_steps_match_algorithm_2",
        ),
        "Equal to the literal algorithm.",
        (_OTHER_SETS,),
    ),
    Statement(
        "thm:smoothness-constants-ratio",
        "theorem",
        "the ratio of smoothness constants in both coordinates",
        ("egop_lab.theory.smoothness_ratio_bound", f"{_BOUNDS}the_smoothness_ratio_is_below_its_bound"),
        "Holds, with the constants of the proof.",
    ),
    Statement(
        "lem:general-LB",
        "lemma",
        "the constants in original coordinates are large, by sign vectors",
        (
            "egop_lab.theory.smoothness_lower_bound",
            f"{_BOUNDS}lemma_2_and_corollary_1_are_below_the_smoothness_sum_in_original_coordinates",
        ),
        "Holds.",
    ),
    Statement(
        "claim:OG-coor-LB",
        "corollary",
        "the same by densities",
        (
            "egop_lab.theory.density_lower_bound",
            f"{_BOUNDS}lemma_2_and_corollary_1_are_below_the_smoothness_sum_in_original_coordinates",
        ),
        "Holds.",
    ),
    Statement(
        "claim:reparam-coor-UB",
        "lemma",
        "the constants in the eigenbasis are small",
        (
            "egop_lab.theory.reparameterized_upper_bound",
            "egop_lab.theory.hessian_upper_bound",
            f"{_BOUNDS}lemma_3_is_above_the_smoothness_sum_in_the_eigenbasis",
        ),
        "Holds.",
    ),
    Statement(
        "lem:Hessian-coor-wise-smooth",
        "lemma",
        "smoothness constants as an inequality of matrices",
        ("egop_lab.theory.smoothness_constants", f"{_BOUNDS}the_constants_of_a_hessian_are_those_of_the_definition"),
        "Holds (the proof lacks factors of ½). Tested from the matrices to the definition.",
    ),
    Statement(
        "lem:EGOP-equation",
        "lemma",
        "the EGOP is that of a quadratic up to an error",
        (
            "egop_lab.theory.quadratic_egop",
            "egop_lab.theory.egop_error",
            f"{_BOUNDS}the_egop_is_that_of_the_quadratic_up_to_gamma",
        ),
        "Holds.",
    ),
    Statement(
        "lemma:relate-square-mat-to-self",
        "lemma",
        "⟨v, A²v⟩ ≤ λ₁(A) ⟨v, Av⟩",
        (f"{_BOUNDS}a_hessian_maps_no_vector_further_than_its_form_allows",),
        "Holds.",
        (_TEST_ONLY,),
    ),
    Statement(
        "lemma:order-preserving-square-root",
        "lemma",
        "roots keep the order of matrices",
        ("egop_lab.theory.square_root", f"{_BOUNDS}roots_keep_the_order_of_matrices_and_squares_do_not"),
        "Holds.",
    ),
    Statement(
        "lemma:equivariant-EGOP",
        "lemma",
        "the EGOP is diagonal in its eigenbasis",
        (f"{_BOUNDS}the_egop_in_its_eigenbasis_is_diagonal",),
        "Holds.",
        (_TEST_ONLY,),
    ),
    Statement(
        "lemma:convex-cvgnce",
        "lemma",
        "regret of Adagrad on any convex set",
        (
            "egop_lab.theory.regret_bound",
            "egop_lab.theory.box_extent",
            f"{_CONVERGENCE}the_averaged_regret_in_a_box_is_below_the_guarantee_for_general_sets",
        ),
        "Holds for quadratics in boxes, with the constants of the proof.",
    ),
    Statement(
        "assumption:f-bounded-below",
        "assumption",
        "the loss is bounded below",
        ("egop_lab.theory.gradient_norm_bound",),
        "It is the argument `gap`, which must be finite.",
    ),
    Statement(
        "lemma:nonconvex-cvgnce",
        "theorem",
        "gradients of Adagrad without convexity",
        (
            "egop_lab.theory.gradient_norm_bound",
            f"{_CONVERGENCE}the_mean_gradient_norm_without_convexity_is_below_its_bound_in_both_coordinates",
            f"{_CONVERGENCE}on_a_quadratic_the_ratio_gives_the_bound_for_the_eigenbasis",
        ),
        "Holds, for gradients in the coordinates in which Adagrad runs; with the ratio, checked on a quadratic.",
        ("The paper does not give the polynomial inside its logarithm; the bound here has a logarithm of its own.",),
    ),
    Statement(
        "lemma:overparam-linear-measurement-Lipschitz-Hessian",
        "lemma",
        "how fast the Hessian of a matrix factorisation changes",
        (
            "egop_lab.theory.matrix_factorization_lipschitz",
            f"{_CLOSED}the_hessian_of_a_matrix_factorisation_is_lipschitz_with_the_stated_constant",
        ),
        "Holds.",
    ),
    Statement(
        "lemma:linear-measurement-overparam-Hessian-bilinear",
        "lemma",
        "the Hessian of a matrix factorisation as a quadratic form",
        (
            "egop_lab.theory.matrix_factorization_curvature",
            f"{_CLOSED}the_curvature_of_a_matrix_factorisation_is_that_of_its_hessian_and_of_differences",
        ),
        "Holds.",
    ),
    Statement(
        "lem:data-decay-induces-EGOP-decay",
        "lemma",
        "decay of the data is decay of the EGOP",
        ("egop_lab.theory.data_decay_bound", f"{_CLOSED}decay_of_the_data_bounds_decay_of_the_egop"),
        "Holds.",
    ),
    Statement(
        "lem:spectral-decay-least-squares",
        "lemma",
        "the EGOP of least squares",
        (
            "egop_lab.theory.least_squares_egop",
            "egop_lab.theory.least_squares_interlacing",
            f"{_CLOSED}the_eigenvalues_of_least_squares_interlace",
        ),
        "Holds; the interval that its proof prints is one index too low.",
    ),
    _figure("tinyMNIST-compare-spectral-decay", "the digits network's spectrum for several rho", "digits-spectrum"),
    _figure("layer-by-layer-spectra", "spectra of single layers", "layer-spectra"),
    _figure("MNIST-global-eigvec-density", "densities of the leading eigenvectors", "digits-density"),
    _figure("ResNet-sup-val", "residual networks, validation loss by epoch", "resnet", missing=(_IMAGENET,)),
    _figure("ResNet-sup", "residual networks, accuracy by epoch", "resnet", missing=(_IMAGENET,)),
    _figure("global-sup", "linear networks: all parameters in one basis", "linear-networks"),
    _figure("block-sup", "linear networks: a basis for each layer", "linear-networks"),
    _figure("first-layer-only-sup", "linear networks: a basis for the first layer", "linear-networks"),
    _figure("sup-linear-networks", "linear networks, all three", "linear-networks"),
    _figure("tinyMNIST-loss-sup", "digits: final training loss by learning rate", "digits"),
    _figure("tinyMNIST-testacc-sup", "digits: final test accuracy by learning rate", "digits"),
    _figure("tinyMNIST-sup", "digits, both", "digits"),
    _figure("auxilliary-cost-benefit-tradeoff", "Fashion-MNIST: accuracy and time", "fashion-mnist"),
    _figure("log-sum-exp-sup", "log-sum-exp", "convex"),
    _figure("log-reg-sup", "logistic regression", "convex"),
    _figure("linear-least-squares-sup", "least squares", "convex"),
    _figure("sup-cvx-objectives", "convex objectives, all three", "convex"),
    Statement(
        "alg:aux-forward-optimized",
        "algorithm",
        "a layer with auxiliary variables",
        ("egop.Auxiliary", "tests/basis/structures/test_low_rank.py::test_auxiliary_is_the_papers_algorithm"),
        "Equal to the literal algorithm.",
    ),
    Statement(
        "alg:cnn-reparam-multiinit",
        "algorithm",
        "one basis for all kernels of a convolution",
        (
            "egop.Shared",
            "tests/basis/structures/test_shared.py::test_shared_is_the_eigenbasis_of_all_kernels_gradients",
            "tests/basis/structures/test_shared.py::test_shared_rotates_each_kernel_by_itself",
        ),
        "Equal to the literal algorithm.",
    ),
    Statement(
        "lemma in sec:compare-w-SOAP-Galore",
        "lemma",
        "rotations of all entries can do more than those of both sides",
        (
            "egop_lab.theory.kronecker_rotation",
            "egop_lab.theory.rotation_beyond_kronecker",
            f"{_CLOSED}rotating_a_matrix_from_both_sides_is_one_rotation_of_its_entries",
            f"{_CLOSED}some_rotations_of_entries_are_none_of_the_two_sides",
        ),
        "Holds, for matrices with two rows and two columns at least.",
    ),
)
