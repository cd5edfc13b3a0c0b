//! Cheap values are recomputed in backward, or kept: the same bits, and what each runtime does by itself.
#![cfg(feature = "emulate")]

use std::path::Path;

use autograd::{Var, autocast, backward, manual_seed, saved_bytes, with_recomputation};
use nn::{Activation, Block, BlockConfig, Forward, Init, ModuleExt};
use numcore::{
    DType, Either, Result, Runtime, Tensor,
    ops::{PointwiseOps, ReduceOps},
};
use runtime_cpu::Cpu;
use runtime_cuda::Cuda;

fn bytes<R: Runtime>(loss: &Var<R>) -> usize {
    saved_bytes(loss).iter().map(|(_, bytes)| bytes).sum()
}

/// What a block of GPT keeps for backward, and the gradients of its input and of all parameters, which `policy` is about.
fn trained<R: Runtime>(rt: &R, half: bool, policy: Option<bool>) -> Result<(usize, Vec<Vec<f64>>)> {
    manual_seed(3);
    let config = BlockConfig { width: 16, heads: 2, bias: true, dropout: 0.2, activation: Activation::GeluTanh };
    let block = Block::new(&Init::new(rt, 1), config)?;
    let x = Var::leaf("x", Tensor::uniform(rt, [2, 8, 16], DType::F32, -1.0, 1.0, 2)?)?;
    let forward = || block.forward(&x)?.square()?.sum_all();
    let forward = || if half { autocast(DType::BF16, forward) } else { forward() };
    let loss = match policy {
        None => forward()?,
        Some(on) => with_recomputation(on, forward)?,
    };
    let kept = bytes(&loss);
    let gradients = backward(&loss)?;
    let variables = block.parameters().into_iter().map(|p| p.var()).chain([x]);
    let gradient = |v: &Var<R>| gradients.of(v).expect("a gradient").to_f64s();
    Ok((kept, variables.map(|v| gradient(&v)).collect::<Result<_>>()?))
}

fn same_bits_either_way<R: Runtime>(rt: &R, recomputes: bool) -> Result<()> {
    for half in [false, true] {
        let [(less, again), (more, kept), (own, default)] =
            [trained(rt, half, Some(true))?, trained(rt, half, Some(false))?, trained(rt, half, None)?];
        assert!(again.iter().all(|g| g.iter().any(|x| *x != 0.0)), "half {half}");
        assert_eq!(again, kept, "half {half}");
        assert_eq!(again, default, "half {half}");
        assert!(less < more, "half {half}: {less} bytes, and {more}");
        assert_eq!(own, if recomputes { less } else { more }, "half {half}");
    }
    Ok(())
}

#[test]
fn the_processor_recomputes() -> Result<()> {
    same_bits_either_way(&Cpu::new(), true)
}

#[test]
fn a_gpu_keeps() -> Result<()> {
    let cuda = emulated_gpu::open(Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated"))?;
    same_bits_either_way(&cuda, false)?;
    assert!(!Either::<Cpu, Cuda>::B(cuda).recomputes_in_backward());
    assert!(Either::<Cpu, Cuda>::A(Cpu::new()).recomputes_in_backward());
    Ok(())
}
