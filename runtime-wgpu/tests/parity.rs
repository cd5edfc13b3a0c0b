//! Parity with the CPU: equal random values to the last bit, and a training step that agrees.

use autograd::{Var, backward};
use nn::{Activation, Forward, Gpt, GptConfig, Init, ModuleExt};
use numcore::{DType, Result, Runtime, Tensor, fused::NnOps, ops::ViewOps};
use runtime_cpu::Cpu;
use runtime_wgpu::Wgpu;

const CONFIG: GptConfig = GptConfig {
    vocab: 61,
    context: 40,
    layers: 2,
    heads: 3,
    width: 48,
    bias: true,
    dropout: 0.1,
    activation: Activation::Gelu,
    tied_head: true,
};

fn gpu() -> Wgpu {
    Wgpu::new(0).expect("an adapter")
}

#[test]
fn random_numbers_are_equal_to_the_last_bit() -> Result<()> {
    fn drawn<R: Runtime>(rt: &R) -> Result<Vec<Vec<u8>>> {
        let x = Tensor::ones(rt, [1001], DType::F32)?;
        let tensors = [
            Tensor::uniform(rt, [70, 31], DType::F32, -0.137, 0.137, 3)?,
            Tensor::uniform(rt, [515], DType::F32, -2.0, 7.5, 4)?,
            Tensor::uniform(rt, [515], DType::BF16, -1.0, 1.0, 4)?,
            Tensor::normal(rt, [333], DType::F32, 0.0, 0.02, 5)?,
            Tensor::bernoulli(rt, [777], 0.3, 6)?,
            Tensor::permutation(rt, 99, 7)?,
            x.dropout(0.35, 8)?,
        ];
        tensors.iter().map(Tensor::to_bytes).collect()
    }
    for (i, (a, b)) in drawn(&Cpu::new())?.iter().zip(&drawn(&gpu())?).enumerate() {
        assert!(a == b, "tensor {i} differs");
    }
    Ok(())
}

/// The initial weights as bytes, the loss, and every gradient.
type Step = (Vec<Vec<u8>>, f64, Vec<(String, Vec<f64>)>);

fn step<R: Runtime>(rt: &R) -> Result<Step> {
    autograd::manual_seed(11);
    let model = Gpt::new(&Init::new(rt, 42), CONFIG)?;
    let parameters = model.parameters();
    let weights = parameters.iter().map(|p| p.value()?.to_bytes()).collect::<Result<_>>()?;
    let ids: Vec<i64> = (0..2 * 33).map(|i| (i * i * 7 + i) % 61).collect();
    let ids = Var::new(Tensor::from_slice(rt, [2, 33], &ids)?);
    let logits = model.forward(&ids.narrow(1, 0, 32)?)?;
    let targets = ids.narrow(1, 1, 32)?.reshape([64])?;
    let loss = logits.reshape([64, 61])?.cross_entropy(&targets)?;
    let gradients = backward(&loss)?;
    let named = model.named_parameters().into_iter().map(|(name, p)| {
        let g = gradients.of(&p.var()).map_or_else(|| Ok(Vec::new()), |g| g.to_f64s())?;
        Ok((name, g))
    });
    Ok((weights, loss.item()?, named.collect::<Result<_>>()?))
}

#[test]
fn a_step_of_a_language_model_agrees_with_the_processor() -> Result<()> {
    let (cpu, gpu) = (step(&Cpu::new())?, step(&gpu())?);
    assert!(cpu.0 == gpu.0, "initial weights differ");
    assert!((cpu.1 - gpu.1).abs() <= 1e-4 * cpu.1.abs(), "loss {} and {}", cpu.1, gpu.1);
    for ((name, a), (_, b)) in cpu.2.iter().zip(&gpu.2) {
        let largest = a.iter().fold(0f64, |m, v| m.max(v.abs()));
        let worst = a.iter().zip(b).fold(0f64, |m, (a, b)| m.max((a - b).abs()));
        assert!(a.len() == b.len() && !a.is_empty() && worst <= 1e-4 * largest, "{name}: {worst:e} of {largest:e}");
    }
    Ok(())
}
