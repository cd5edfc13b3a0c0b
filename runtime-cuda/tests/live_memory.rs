//! What a training step holds of a GPU's memory, beside what the tape says that it keeps, and what changing sequence lengths reserve. On a GPU that
//! computes nothing.
#![cfg(feature = "emulate")]

use autograd::{Var, autocast, saved_bytes, with_recomputation};
use nn::{Forward, Gpt, GptConfig, Init};
use numcore::{DType, MemoryCategory, Result, Runtime, Tensor, fused::NnOps};
use optim::{AdamW, AdamWConfig, Optimizer};
use runtime_cuda::Cuda;

const BATCH: usize = 64;
const CONTEXT: usize = 64;

fn model(rt: &Cuda, dropout: f64) -> Result<Gpt<Cuda>> {
    let small = GptConfig { vocab: 4096, context: CONTEXT, layers: 4, heads: 8, width: 256, ..Default::default() };
    Gpt::new(&Init::new(rt, 0), GptConfig { dropout, ..small })
}

fn tokens(rt: &Cuda, length: usize) -> Result<Var<Cuda>> {
    Ok(Var::new(Tensor::from_slice(rt, [BATCH, length], &vec![0i64; BATCH * length])?))
}

fn loss(model: &Gpt<Cuda>, tokens: &Var<Cuda>, dtype: DType) -> Result<Var<Cuda>> {
    let loss = || model.forward(tokens)?.cross_entropy(tokens);
    if dtype == DType::F32 { loss() } else { autocast(dtype, loss) }
}

/// When forward is done, what is live beyond what was before is what the tape keeps, within a tenth.
#[test]
fn activations_are_what_the_tape_keeps() -> Result<()> {
    for dropout in [0.0, 0.1] {
        let (cuda, _) = emulated_gpu::unexecuted(8 << 30)?;
        let model = model(&cuda, dropout)?;
        let tokens = tokens(&cuda, CONTEXT)?;
        let live = || cuda.memory().of(MemoryCategory::Activations).live as f64;
        let before = live();
        for (dtype, recomputed) in [DType::F32, DType::BF16].into_iter().flat_map(|d| [(d, false), (d, true)]) {
            let loss = with_recomputation(recomputed, || loss(&model, &tokens, dtype))?;
            let held = live() - before;
            let kept = saved_bytes(&loss).iter().map(|(_, bytes)| *bytes).sum::<usize>() as f64;
            assert!(kept > 1e8, "{dtype}: {kept}");
            assert!(
                (held / kept - 1.0).abs() < 0.1,
                "{dtype}, dropout {dropout}, recomputed {recomputed}: {held} bytes are live, the tape keeps {kept}"
            );
        }
    }
    Ok(())
}

/// Sequences of 17 to 64 tokens in turn: what is reserved stays within a quarter of the largest peak, and nothing is asked of the driver after the
/// first pass over the lengths.
#[test]
fn changing_lengths_reserve_little_more_than_the_longest() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let (cuda, memory) = emulated_gpu::unexecuted(8 << 30)?;
        let model = model(&cuda, 0.0)?;
        let mut optimizer = AdamW::new(&model, AdamWConfig::default())?;
        let (mut after_first_pass, mut most_reserved) = (0, 0);
        for step in 0..60 {
            let tokens = tokens(&cuda, 17 + step % 48)?;
            optimizer.backward(&loss(&model, &tokens, dtype)?)?;
            optimizer.step()?;
            most_reserved = most_reserved.max(cuda.memory().reserved);
            if step == 47 {
                after_first_pass = memory.allocations();
            }
        }
        let peak = cuda.memory().total.peak;
        assert!(peak > 100 << 20, "{peak}");
        let ratio = most_reserved as f64 / peak as f64;
        assert!(ratio <= 1.25, "{dtype}: {ratio:.3} times the peak of {peak} bytes are reserved");
        assert_eq!(memory.allocations(), after_first_pass, "{dtype}: the driver was asked after the first pass");
    }
    Ok(())
}
