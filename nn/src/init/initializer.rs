//! Initializers of parameters; formulas and gains are those of `torch.nn.init`.

use numcore::{DType, Error, Result, Runtime, Shape, Tensor, rng::Philox};

use super::orthogonal::orthogonal;

/// The side of a weight whose variance is kept: `weight: [O, I, ..]` has fan-in `I · ..` and fan-out `O · ..`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fan {
    /// The fan-in: it keeps the variance of the forward pass.
    In,
    /// The fan-out: it keeps the variance of the backward pass.
    Out,
}

/// The nonlinearity after a layer: weights get a larger gain where it shrinks the variance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Nonlinearity {
    /// No activation, or the logistic function.
    Linear,
    /// The hyperbolic tangent activation.
    Tanh,
    /// The rectified linear unit, ReLU.
    Relu,
    /// The leaky rectified linear unit with this negative slope.
    LeakyRelu(f64),
    /// The self-normalizing unit, SELU.
    Selu,
}

impl Nonlinearity {
    /// The factor on the standard deviation, as in `torch.nn.init.calculate_gain`.
    pub fn gain(self) -> f64 {
        match self {
            Nonlinearity::Linear => 1.0,
            Nonlinearity::Tanh => 5.0 / 3.0,
            Nonlinearity::Relu => 2f64.sqrt(),
            Nonlinearity::LeakyRelu(slope) => (2.0 / (1.0 + slope * slope)).sqrt(),
            Nonlinearity::Selu => 0.75,
        }
    }
}

/// The distribution of initial values. Random initializers need a floating dtype; those that use a fan need two axes or
/// more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initializer {
    /// Every element is 0.
    Zeros,
    /// Every element is 1.
    Ones,
    /// Every element is this value.
    Constant(f64),
    /// A uniform distribution on `[low, high)`.
    Uniform {
        /// The lower bound, inclusive.
        low: f64,
        /// The upper bound, exclusive.
        high: f64,
    },
    /// A normal distribution, not truncated.
    Normal {
        /// The mean of the distribution.
        mean: f64,
        /// The standard deviation of the distribution.
        std: f64,
    },
    /// A normal distribution truncated to `[low, high]`: values outside are drawn again.
    TruncNormal {
        /// The mean of the normal before truncation.
        mean: f64,
        /// The standard deviation of the normal before truncation.
        std: f64,
        /// The lower bound of the truncation.
        low: f64,
        /// The upper bound of the truncation.
        high: f64,
    },
    /// Xavier initialization: uniform with variance `2 · gain² / (fan-in + fan-out)` (Glorot & Bengio 2010).
    XavierUniform {
        /// The factor on the standard deviation; see [`Nonlinearity::gain`].
        gain: f64,
    },
    /// Xavier initialization: normal with variance `2 · gain² / (fan-in + fan-out)`.
    XavierNormal {
        /// The factor on the standard deviation; see [`Nonlinearity::gain`].
        gain: f64,
    },
    /// Kaiming initialization: uniform with variance `gain² / fan` (He et al. 2015).
    KaimingUniform {
        /// The fan that the variance is divided by.
        fan: Fan,
        /// The factor on the standard deviation; see [`Nonlinearity::gain`].
        gain: f64,
    },
    /// Kaiming initialization: normal with variance `gain² / fan`.
    KaimingNormal {
        /// The fan that the variance is divided by.
        fan: Fan,
        /// The factor on the standard deviation; see [`Nonlinearity::gain`].
        gain: f64,
    },
    /// Orthonormal rows (or columns, if these are fewer) times `gain`, of the weight seen as `[O, I · ..]` (Saxe et al.
    /// 2013). Computed on the host in `O · I · min(O, I)` operations.
    Orthogonal {
        /// The factor on the orthonormal matrix; see [`Nonlinearity::gain`].
        gain: f64,
    },
}

impl Initializer {
    /// Uniform in `±1/√fan`, PyTorch's default for linear layers, convolutions and their biases; 0 for a fan of 0.
    pub fn by_fan(fan: usize) -> Self {
        let bound = if fan == 0 { 0.0 } else { 1.0 / (fan as f64).sqrt() };
        Initializer::Uniform { low: -bound, high: bound }
    }

    /// A tensor initialized from `seed`: equal on every runtime.
    #[track_caller]
    pub fn tensor<R: Runtime>(self, rt: &R, shape: impl AsRef<[usize]>, dtype: DType, seed: u64) -> Result<Tensor<R>> {
        let shape = Shape::new(shape.as_ref())?;
        let uniform = |bound: f64| Tensor::uniform(rt, shape, dtype, -bound, bound, seed);
        let normal = |std: f64| Tensor::normal(rt, shape, dtype, 0.0, std, seed);
        match self {
            Initializer::Zeros => Tensor::zeros(rt, shape, dtype),
            Initializer::Ones => Tensor::ones(rt, shape, dtype),
            Initializer::Constant(value) => Tensor::full(rt, shape, dtype, value),
            Initializer::Uniform { low, high } => Tensor::uniform(rt, shape, dtype, low, high, seed),
            Initializer::Normal { mean, std } => Tensor::normal(rt, shape, dtype, mean, std, seed),
            Initializer::TruncNormal { mean, std, low, high } => {
                let mut draw = truncated(mean, std, low, high, seed)?;
                Tensor::from_f64_fn(rt, shape, dtype, &mut draw)
            }
            Initializer::XavierUniform { gain } => uniform(3f64.sqrt() * xavier_std(shape, gain)?),
            Initializer::XavierNormal { gain } => normal(xavier_std(shape, gain)?),
            Initializer::KaimingUniform { fan, gain } => uniform(3f64.sqrt() * kaiming_std(shape, fan, gain)?),
            Initializer::KaimingNormal { fan, gain } => normal(kaiming_std(shape, fan, gain)?),
            Initializer::Orthogonal { gain } => {
                let [rows, columns] = matrix(shape)?;
                let mut values = orthogonal(rows, columns, seed).into_iter();
                Tensor::from_f64_fn(rt, shape, dtype, || values.next().unwrap_or(0.0) * gain)
            }
        }
    }
}

fn xavier_std(shape: Shape, gain: f64) -> Result<f64> {
    Ok(gain * (2.0 / (fan(shape, Fan::In)? + fan(shape, Fan::Out)?)).sqrt())
}

fn kaiming_std(shape: Shape, side: Fan, gain: f64) -> Result<f64> {
    Ok(gain / fan(shape, side)?.sqrt())
}

/// The fan, at least 1, so that a weight of no elements has a standard deviation.
fn fan(shape: Shape, side: Fan) -> Result<f64> {
    let [rows, columns] = matrix(shape)?;
    let field: usize = shape[2..].iter().product();
    let fan = if side == Fan::In { columns } else { rows * field };
    Ok(fan.max(1) as f64)
}

/// A weight seen as a matrix, `[O, I · ..]`.
fn matrix(shape: Shape) -> Result<[usize; 2]> {
    if shape.rank() < 2 {
        return Err(Error::shape("initializer", &[shape], "only weights with two axes or more have a fan"));
    }
    Ok([shape[0], shape[1..].iter().product()])
}

/// Draws of a normal that fall in a window. One that holds too little of the normal to be drawn by trial is refused.
fn truncated(mean: f64, std: f64, low: f64, high: f64, seed: u64) -> Result<impl FnMut() -> f64> {
    let below = |x: f64| 0.5 * (1.0 + libm::erf((x - mean) / (std * std::f64::consts::SQRT_2)));
    let mass = below(high) - below(low);
    if std.is_nan() || std <= 0.0 {
        return Err(Error::range("trunc_normal", "deviation", std, "above 0"));
    }
    // A NaN among the other arguments gives one here.
    if mass.is_nan() || mass < 1e-3 {
        let allowed = format!(
            "at least 1e-3, the part of the normal with mean {mean} and deviation {std} in [{low}, {high}]; use a uniform"
        );
        return Err(Error::range("trunc_normal", "probability", mass, allowed));
    }
    let mut rng = Philox::new(seed, 0);
    Ok(move || {
        loop {
            let x = mean + std * rng.normal();
            if (low..=high).contains(&x) {
                return x;
            }
        }
    })
}
