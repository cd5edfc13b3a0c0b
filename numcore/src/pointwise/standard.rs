//! Small programs that several crates use.

use std::sync::LazyLock;

use super::{Program, Widened};

/// The sum `a + b`.
pub static ADD: LazyLock<Program> = LazyLock::new(|| Program::new("add", |[a, b], []| [a + b]));

/// The input `x`, cast to the dtype of the output.
pub static COPY: LazyLock<Program> = LazyLock::new(|| Program::new("copy", |[x], []| [x]));

/// A scalar in every element; the input is the old value, which is not read.
pub static FILL: LazyLock<Program> = LazyLock::new(|| Program::new("fill", |[_], [value]| [value]));

/// The square `x²`, to be summed.
pub static SQUARES: LazyLock<Widened> =
    LazyLock::new(|| Widened::new(|wide| Program::new("squares", |[x], []| [wide.of(x) * wide.of(x)])));

/// The value 0 if `x` is finite and NaN otherwise, to be summed.
pub static ZERO_IF_FINITE: LazyLock<Widened> =
    LazyLock::new(|| Widened::new(|wide| Program::new("zero_if_finite", |[x], []| [wide.of(x) * 0.0])));
