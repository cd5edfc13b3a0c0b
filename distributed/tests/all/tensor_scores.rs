//! Programs of scores in layers whose heads are cut over ranks: outputs and all gradients are those of the whole layer.

use nn::{
    Initializer,
    parallel::{AttentionScores, set_scores},
};

use crate::{prelude::*, tensor_layers::same_in};

/// The model, with learned slopes of each head and a learned cap of all. Scores depend on the number of the head.
fn scored<M: Module<Cpu>>(init: &Init<Cpu>, model: M, heads: usize) -> Result<M> {
    let program = AttentionProgram::over(2).score(|score, at, args| {
        let distance = (at.key - at.query).cast_like(score);
        ((score + args[0] * distance + (at.head + 1).cast_like(score) * 0.3) / args[1]).tanh() * args[1]
    });
    set_scores(&model, |_| {
        let slopes = init.param([heads, 1, 1], Initializer::Uniform { low: 0.1, high: 0.5 })?;
        let scores = AttentionScores::by(program.clone()).learned("slopes", slopes);
        Ok(Some(scores.learned("cap", init.param([1], Initializer::Constant(1.5))?)))
    })?;
    Ok(model)
}

fn encoder(init: &Init<Cpu>) -> Result<EncoderBlock<Cpu>> {
    let (activation, pre_norm, qkv_bias) = (Activation::Gelu, true, true);
    let config =
        EncoderBlockConfig { width: 8, heads: 4, hidden: 12, activation, pre_norm, qkv_bias, eps: 1e-6, dropout: 0.0 };
    scored(init, EncoderBlock::new(init, config)?, 4)
}

fn plan() -> TensorPlan {
    TensorPlan::new().column("query").column("key").column("value").row("output").column("fc1").row("fc2")
}

fn input(rt: &Cpu) -> Result<Var<Cpu>> {
    Ok(Var::new(Tensor::normal(rt, [2, 5, 8], DType::F64, 0.0, 1.0, 3)?))
}

#[test]
fn heads_have_their_own_arguments_and_a_part_of_the_gradient_of_shared_ones() {
    for t in [1, 2, 4] {
        same_in(DType::F64, 1e-12, t, &plan().column("scores"), encoder, |block, rt| block.forward(&input(rt)?));
    }
    let case = Way::gpt(2);
    let make = |init: &Init<Cpu>| scored(init, Gpt::new(init, case.gpt)?, case.gpt.heads);
    for sequence in [false, true] {
        let plan = Gpt::<Cpu>::tensor_plan().sequence_parallel(sequence);
        same_in(DType::F64, 1e-12, 2, &plan, make, |model, rt| model.forward(&case.batch(rt, 0, &[0, 1])?.0));
    }
}

#[test]
fn arguments_are_cut_as_their_heads_are() {
    let error = |plan: TensorPlan| {
        let run = |comm: Comm<Cpu>| {
            let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, comm.size())])?)?;
            let block = encoder(&Init::new(comm.runtime(), 5).dtype(DType::F64))?;
            mesh.parallelize(&block, &plan)?;
            Ok(block.forward(&input(comm.runtime())?).unwrap_err().to_string())
        };
        Ranks::new(2).run(cpu, run).unwrap().remove(0)
    };
    let uncut = error(plan());
    assert!(uncut.contains("slopes") && uncut.contains("heads are cut over ranks: name it by `column`"), "{uncut}");
    let whole = error(TensorPlan::new().column("scores"));
    assert!(whole.contains("slopes") && whole.contains("heads are whole: leave it out of the plan"), "{whole}");
}
