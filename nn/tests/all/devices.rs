//! A model between devices, its parts in several dtypes, and mixed precision.

use std::collections::HashMap;

use autograd::{Var, autocast, backward};
use nn::{BatchNorm1d, Forward, Gpt, GptConfig, Init, Linear, Module, ModuleExt, under};
use numcore::{DType, NullRuntime, Result, Runtime, Tensor, fused::NnOps};
use runtime_cpu::Cpu;

#[derive(Module)]
#[module(crate = "::nn")]
struct Net<R: Runtime> {
    a: Linear<R>,
    norm: BatchNorm1d<R>,
    b: Linear<R>,
}

fn net<R: Runtime>(rt: &R, seed: u64, outputs: usize) -> Result<Net<R>> {
    let init = Init::new(rt, seed);
    Ok(Net { a: Linear::new(&init, 3, 4)?, norm: BatchNorm1d::new(&init, 4)?, b: Linear::new(&init, 4, outputs)? })
}

fn state(net: &Net<Cpu>) -> HashMap<String, (DType, Vec<f64>)> {
    let dict = net.state_dict().unwrap();
    dict.into_iter().map(|(name, value)| (name, (value.dtype(), value.to_f64s().unwrap()))).collect()
}

#[test]
fn a_copy_is_the_model() -> Result<()> {
    // Two queues of their own, as of two devices.
    let (here, there) = (Cpu::with_threads(1), Cpu::with_threads(2));
    let (from, to) = (net(&here, 1, 2)?, net(&there, 2, 2)?);
    from.a.weight.to_dtype(DType::BF16)?;
    from.freeze_where(under("b"));
    assert_ne!(state(&from), state(&to));
    to.copy_from(&from)?;
    assert_eq!(state(&from), state(&to));
    let trained = |net: &Net<Cpu>| net.parameters().iter().map(|p| p.requires_grad()).collect::<Vec<_>>();
    assert_eq!(trained(&from), trained(&to));
    // A copy: the model it came from goes its own way.
    from.b.weight.set(Tensor::zeros(&here, [2, 4], DType::F32)?)?;
    assert_ne!(state(&from), state(&to));
    // Another kind of device.
    net(&NullRuntime::new(), 3, 2)?.copy_from(&to)
}

#[test]
fn another_structure_changes_nothing() -> Result<()> {
    let cpu = Cpu::with_threads(1);
    let (from, to) = (net(&cpu, 1, 5)?, net(&cpu, 2, 2)?);
    from.a.weight.to_dtype(DType::F64)?;
    let before = state(&to);
    let said = to.copy_from(&from).unwrap_err().to_string();
    assert!(said.contains("b.weight is [2, 4] here and [5, 4] there") && said.contains("b.bias"), "{said}");
    let said = to.copy_from(&to.a).unwrap_err().to_string();
    assert!(said.contains("missing") && said.contains("unexpected: bias, weight"), "{said}");
    assert_eq!(state(&to), before);
    Ok(())
}

#[test]
fn parts_have_dtypes_of_their_own() -> Result<()> {
    let net = net(&Cpu::with_threads(1), 1, 2)?;
    net.to_dtype_where(under("norm"), DType::F64)?;
    let wide: Vec<String> =
        net.state_dict()?.into_iter().filter(|(_, v)| v.dtype() == DType::F64).map(|(name, _)| name).collect();
    assert_eq!(wide, ["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]);
    Ok(())
}

/// Under mixed precision the loss is near that of `f32`, and gradients of `f32` parameters are `f32`.
#[test]
fn a_gpt_trains_in_mixed_precision() -> Result<()> {
    let cpu = Cpu::with_threads(1);
    let config = GptConfig { vocab: 11, context: 8, layers: 2, heads: 2, width: 16, ..Default::default() };
    let gpt = Gpt::new(&Init::new(&cpu, 5), config)?;
    let tokens: Vec<i64> = (0..16).map(|i| i * 7 % 11).collect();
    let x = Var::new(Tensor::from_slice(&cpu, [2, 8], &tokens)?);
    let loss = || gpt.forward(&x)?.cross_entropy(&x);
    let (full, mixed) = (loss()?, autocast(DType::BF16, loss)?);
    assert_eq!(mixed.dtype(), DType::F32);
    assert!((full.item()? - mixed.item()?).abs() < 0.02 * full.item()?, "{} {}", full.item()?, mixed.item()?);
    assert_ne!(full.item()?, mixed.item()?);
    let gradients = backward(&mixed)?;
    for (name, p) in gpt.named_parameters() {
        assert_eq!(gradients.get(&p.leaf()).expect("a gradient").dtype(), DType::F32, "{name}");
    }
    Ok(())
}
