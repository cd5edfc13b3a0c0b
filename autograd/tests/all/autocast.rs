//! Automatic mixed precision: the type each operation runs in, and that backward is that of the casts written by hand.

use crate::common::cpu;
use crate::common::run_checkpointed;
use autograd::{
    Backward, Gradients, Var, autocast, autocast_dtype, backward, differentiable_grad, no_autocast, recomputed,
};
use numcore::{
    DType, Result, Tensor,
    fused::{ConvOptions, NnOps},
    ops::{IndexOps, MatmulOps, PointwiseOps, ReduceOps, ScanOps, ViewOps, cat},
};
use runtime_cpu::Cpu;

const HALF: DType = DType::BF16;

fn leaf(name: &str, shape: [usize; 2], seed: u64) -> Var<Cpu> {
    Var::leaf(name, Tensor::uniform(&cpu(), shape, DType::F32, -1.0, 1.0, seed).unwrap()).unwrap()
}

fn gradient(gradients: &Gradients<Cpu>, of: &Var<Cpu>) -> (DType, Vec<f64>) {
    let gradient = gradients.of(of).unwrap();
    (gradient.dtype(), gradient.to_f64s().unwrap())
}

#[test]
fn operations_run_in_pytorchs_types() -> Result<()> {
    let (x, w, b) =
        (leaf("x", [4, 4], 1), leaf("w", [4, 4], 2), Var::leaf("b", Tensor::zeros(&cpu(), [4], DType::F32)?)?);
    let index = Var::new(Tensor::from_slice(&cpu(), [2], &[0i64, 3])?);
    let image = x.reshape([1, 1, 4, 4])?;
    autocast(HALF, || {
        let h = x.matmul(&w)?;
        let halves =
            [&h, &x.linear(&w, Some(&b))?, &image.conv2d(&image, None, ConvOptions::default())?, &h.tanh()?, &h.t()?];
        let q = image.causal_attention(&image, &image)?;
        assert!(halves.into_iter().chain([&q]).all(|v| v.dtype() == HALF));
        let classes = Var::new(Tensor::zeros(&cpu(), [4], DType::I64)?);
        let full = [
            h.softmax(-1)?,
            h.log_softmax(-1)?,
            h.layer_norm(Some(&b), None, 1e-5)?,
            h.rms_norm(Some(&b), 1e-5)?,
            h.cross_entropy(&classes)?,
            h.sum_all()?,
            h.mean_all()?,
            h.cumsum(0)?,
            h.add(&x)?,
            cat(&[&h, &x], 0)?,
            x.exp()?,
            w.embedding(&index)?,
        ];
        assert_eq!(full.map(|v| v.dtype()), [DType::F32; 12]);
        Ok(())
    })
}

#[test]
fn other_types_stay() -> Result<()> {
    let x = Var::leaf("x", Tensor::ones(&cpu(), [2, 2], DType::F64)?)?;
    let (half, whole) = (leaf("h", [2, 2], 3).to_dtype(HALF)?, Var::new(Tensor::ones(&cpu(), [2, 2], DType::I64)?));
    autocast(HALF, || {
        assert_eq!(x.matmul(&x)?.dtype(), DType::F64);
        assert_eq!(x.softmax(-1)?.dtype(), DType::F64);
        assert_eq!(half.add(&x)?.dtype(), DType::F64);
        assert_eq!(whole.sum_all()?.dtype(), whole.add(&whole)?.dtype());
        assert_eq!(half.to_dtype(DType::F16)?.add(&half)?.dtype(), DType::F32);
        Ok(())
    })
}

#[test]
fn scopes_nest_and_end() {
    assert!(autocast(DType::F32, || Ok(())).unwrap_err().to_string().contains("autocast: dtypes f32"));
    let inside = autocast(HALF, || {
        let inner = autocast(DType::F16, || Ok(autocast_dtype()))?;
        Ok((autocast_dtype(), inner, no_autocast(autocast_dtype)))
    });
    assert_eq!(inside.unwrap(), (Some(HALF), Some(DType::F16), None));
    let panicked = std::panic::catch_unwind(|| autocast::<()>(HALF, || panic!("for the test")));
    assert!(panicked.is_err() && autocast_dtype().is_none());
}

/// Computes `mean(softmax(x·w)²)`, cast as mixed precision does.
fn by_hand(x: &Var<Cpu>, w: &Var<Cpu>) -> Result<Var<Cpu>> {
    let h = x.to_dtype(HALF)?.matmul(&w.to_dtype(HALF)?)?;
    h.to_dtype(DType::F32)?.softmax(-1)?.square()?.sum_all()
}

fn model(x: &Var<Cpu>, w: &Var<Cpu>) -> Result<Var<Cpu>> {
    x.matmul(w)?.softmax(-1)?.square()?.sum_all()
}

#[test]
fn gradients_are_those_of_casts_by_hand() -> Result<()> {
    let (x, w) = (leaf("x", [5, 8], 4), leaf("w", [8, 6], 5));
    let expected = backward(&by_hand(&x, &w)?)?;
    let is = |loss: Var<Cpu>| -> Result<()> {
        let gradients = backward(&loss)?;
        assert_eq!(gradient(&gradients, &w), gradient(&expected, &w));
        assert_eq!(gradient(&gradients, &x), gradient(&expected, &x));
        assert_eq!(gradient(&gradients, &w).0, DType::F32);
        Ok(())
    };
    is(autocast(HALF, || model(&x, &w))?)?;
    // Recomputed in backward, outside of the scope, as they were in it.
    is(autocast(HALF, || Ok(run_checkpointed(&[&x, &w], |v| Ok(vec![model(&v[0], &v[1])?]))?.remove(0)))?)?;
    is(autocast(HALF, || recomputed(&[&x, &w], |v| v[0].matmul(&v[1]))?.softmax(-1)?.square()?.sum_all())?)?;
    // Backward in the scope runs as outside of it, kept weight gradients too.
    let inside = autocast(HALF, || backward(&model(&x, &w)?))?;
    assert_eq!(gradient(&inside, &w), gradient(&expected, &w));
    let mut deferred = Gradients::new();
    autocast(HALF, || Backward::of(&model(&x, &w)?)?.inputs_only(&[&x], &mut deferred)?.run(&mut deferred))?;
    assert_eq!(gradient(&deferred, &w), gradient(&expected, &w));
    Ok(())
}

#[test]
fn second_derivatives_are_those_of_casts_by_hand() -> Result<()> {
    let (x, w) = (leaf("x", [3, 4], 6), leaf("w", [4, 5], 7));
    let second = |loss: Var<Cpu>| -> Result<_> {
        let first = differentiable_grad(&[&loss], &[&w])?.remove(0).unwrap();
        Ok(gradient(&backward(&first.square()?.sum_all()?)?, &w))
    };
    let expected = second(by_hand(&x, &w)?)?;
    assert_eq!(autocast(HALF, || second(model(&x, &w)?))?, expected);
    Ok(())
}
