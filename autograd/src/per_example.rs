//! Gradients of a loss for each example of a batch.

use numcore::{
    Error, Result, Runtime, Tensor, Within,
    ops::{MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};

use crate::{Backward, Gradients, Leaf, Var};

/// The gradients of each of `losses: [B]` with respect to the leaves: `[B, ..]` for a leaf `[..]`. One backward pass
/// computes them, and keeps the graph.
///
/// The examples are on the first axis of every activation that meets a parameter. A parameter may be a factor of a
/// product of matrices, a bias, a table of rows or the kernel of a convolution. It may also be the weight of a norm
/// over the last axes, or an argument of an attention program. A product's gradients are one batched product.
///
/// A second backward pass checks the results: their weighted sum must be the gradient of the weighted sum of the
/// losses.
///
/// ```
/// use autograd::{Var, per_example_gradients};
/// use numcore::{Tensor, ops::{MatmulOps, PointwiseOps, ReduceOps}};
/// use runtime_cpu::Cpu;
///
/// let cpu = Cpu::new();
/// let w = Var::leaf("w", Tensor::from_slice(&cpu, [2, 1], &[1.0f32, -1.0])?)?;
/// let x = Var::new(Tensor::from_slice(&cpu, [3, 2], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?);
/// let losses = x.matmul(&w)?.square()?.sum(&[1])?;
/// let gradients = per_example_gradients(&losses)?;
/// let of_w = gradients.of(&w).expect("the losses depend on it"); // [3, 2, 1]
/// assert_eq!(of_w.to_f64s()?, [-2.0, -4.0, -6.0, -8.0, -10.0, -12.0]);
/// # Ok::<(), numcore::Error>(())
/// ```
///
/// # Errors
/// An error unless `losses` is a vector that requires gradients. An error that names the leaf if a parameter is used in
/// another way, as under `autocast` and by `linear_cross_entropy`. Also if examples are mixed, as by batch norm, or are
/// along another axis.
#[doc(alias("grad_sample", "per_sample_gradients"))]
#[track_caller]
pub fn per_example_gradients<R: Runtime>(losses: &Var<R>) -> Result<Gradients<R>> {
    let dims = losses.dims();
    let [examples] = dims[..] else {
        let why = "needs a vector of losses, one for each example";
        return Err(Error::lengths("per_example_gradients", &dims, why)).at_caller();
    };
    let rt = losses.value()?.runtime().clone();
    let ones = Var::new(Tensor::ones(&rt, [examples], losses.dtype())?);
    let mut all = Gradients::new();
    Backward::from(losses, &ones)?.retain_graph().by_example(examples).run(&mut all)?;

    let mut at = 0.0f64;
    let weights = Tensor::from_f64_fn(&rt, [examples], losses.dtype(), || {
        at += 1.7;
        at.sin() + 0.3
    })?;
    let mut weighted = Gradients::new();
    Backward::from(losses, &Var::new(weights.clone()))?.retain_graph().run(&mut weighted)?;
    for (leaf, apart) in all.iter() {
        check(leaf, apart, &weights, weighted.get(leaf)).at_caller()?;
    }
    Ok(all)
}

/// Checks that the weighted sum of the gradients of examples is the gradient of the weighted sum of their losses.
fn check<R: Runtime>(leaf: &Leaf<R>, apart: &Tensor<R>, weights: &Tensor<R>, whole: Option<&Tensor<R>>) -> Result<()> {
    let (dtype, examples) = (apart.dtype().compute(), weights.dims()[0]);
    let rows = apart.reshape([examples, apart.shape().numel() / examples.max(1)])?.to_dtype(dtype)?;
    let weights = weights.to_dtype(dtype)?.unsqueeze(0)?;
    let sum = weights.matmul(&rows)?.reshape([rows.dims()[1]])?;
    let most = weights.abs()?.matmul(&rows.abs()?)?.reshape([rows.dims()[1]])?;
    let Some(whole) = whole.filter(|whole| whole.shape().numel() > 0) else { return Ok(()) };
    let difference = sum.sub(&whole.reshape([rows.dims()[1]])?.to_dtype(dtype)?)?.abs()?.amax(&[0])?.item()?;
    let bound = leaf.spec().dtype.epsilon().sqrt() * most.amax(&[0])?.item()?;
    if difference <= bound {
        return Ok(());
    }
    let why = format!(
        "has no gradients of single examples: a weighted sum of them is off by {difference:.1e}. Examples must be on the \
         first axis of every activation, and no layer may mix them, as batch norm does"
    );
    Err(Error::state(leaf.name().to_string(), why))
}
