//! Small programs that several crates run.

use std::sync::LazyLock;

use super::{Program, Widened};

/// `a + b`.
pub static ADD: LazyLock<Program> = LazyLock::new(|| Program::new("add", |[a, b], []| [a + b]));

/// `x`, cast to the type of the output.
pub static COPY: LazyLock<Program> = LazyLock::new(|| Program::new("copy", |[x], []| [x]));

/// A scalar in every element; the input is what was there.
pub static FILL: LazyLock<Program> = LazyLock::new(|| Program::new("fill", |[_], [value]| [value]));

/// `x²`, to be summed.
pub static SQUARES: LazyLock<Widened> =
    LazyLock::new(|| Widened::new(|wide| Program::new("squares", |[x], []| [wide.of(x) * wide.of(x)])));

/// 0 where `x` is finite and NaN elsewhere, to be summed.
pub static ZERO_IF_FINITE: LazyLock<Widened> =
    LazyLock::new(|| Widened::new(|wide| Program::new("zero_if_finite", |[x], []| [wide.of(x) * 0.0])));
