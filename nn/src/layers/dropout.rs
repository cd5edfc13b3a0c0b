//! Dropout layers.

use autograd::{Var, next_seed};
use numcore::{Error, Result, Runtime, Within, fused::NnOps};

use crate::{Forward, Mode, Module};

/// Dropout (Srivastava et al. 2014): in training, elements become 0 with probability `p` and the others `1/(1−p)` times
/// as large.
///
/// Each call draws a seed from its thread's stream ([`autograd::manual_seed`]); the mask depends only on that seed.
#[derive(Debug, Module)]
pub struct Dropout {
    p: f64,
    /// Whether the layer is in training or in evaluation mode.
    pub mode: Mode,
}

impl Dropout {
    /// A layer with drop probability `p` in `[0, 1)`.
    pub fn new(p: f64) -> Result<Self> {
        if !(0.0..1.0).contains(&p) {
            return Err(Error::argument("dropout", format!("probability {p} is not in [0, 1)")));
        }
        Ok(Dropout { p, mode: Mode::default() })
    }

    /// Whether the layer returns its input: in evaluation, and with probability 0.
    pub fn is_identity(&self) -> bool {
        self.p == 0.0 || !self.mode.is_training()
    }
}

impl<R: Runtime> Forward<R> for Dropout {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        if self.is_identity() {
            return Ok(x.clone());
        }
        x.dropout(self.p, next_seed()).at_caller()
    }
}
