//! Bytes that a block keeps between forward and backward, cut over ranks: the table of Korthikanti et al. (2022) for the kernels here.

use crate::prelude::*;

const WIDTH: usize = 64;
const HEADS: usize = 4;
const TOKENS: usize = 64;

/// What blocks keep more of than one fewer, in `f32` numbers a token, on each rank.
fn kept(t: usize, sequence: bool) -> Vec<f64> {
    let of = |layers: usize| {
        let config = GptConfig { vocab: 16, context: TOKENS, layers, heads: HEADS, width: WIDTH, ..Default::default() };
        let ranks = Ranks::new(t).run(cpu, |comm| {
            let rt: &Cpu = comm.runtime();
            let model = Gpt::new(&Init::new(rt, 3).lazily(), config)?;
            let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, t)])?)?;
            mesh.parallelize(&model, &Gpt::<Cpu>::tensor_plan().sequence_parallel(sequence))?;
            for (_, parameter) in nn::ModuleExt::named_parameters(&model) {
                let leaf = parameter.leaf();
                leaf.set(leaf.value()?)?;
            }
            let tokens = Var::new(Tensor::zeros(rt, [1, TOKENS], DType::I64)?);
            let x = model.embed(&tokens)?;
            let live = || rt.memory().of(MemoryCategory::Activations).live;
            let before = live();
            let y = model.blocks.iter().try_fold(x.clone(), |x, block| block.forward(&x))?;
            let bytes = live() - before;
            drop((x, y));
            Ok(bytes)
        });
        ranks.unwrap()
    };
    let numbers = |(more, fewer): (usize, usize)| (more - fewer) as f64 / (4 * TOKENS) as f64;
    of(3).into_iter().zip(of(2)).map(numbers).collect()
}

#[test]
fn a_block_keeps_what_the_table_says() {
    let (h, a) = (WIDTH as f64, HEADS as f64);
    // Cut by `t`: queries, keys and values, what attention makes of them, the middle of the feed-forward network, and the scores' logarithms.
    let within = 3.0 * h + h + 4.0 * h + a;
    // On every rank, or of its part of the sequence: the input of each of two norms, which are computed again.
    let between = 2.0 * h;
    for t in [1, 2, 4] {
        for (sequence, due) in [(false, between + within / t as f64), (true, (between + within) / t as f64)] {
            for own in kept(t, sequence) {
                assert_eq!(own, due, "{t} ranks, sequence {sequence}");
            }
        }
    }
}
