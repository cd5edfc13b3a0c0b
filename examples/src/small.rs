//! A small decoder in `f64` and its batches, for programs that compare many ranks with one. Every number follows from
//! seeds and positions, so all ranks make the same ones.

use std::ops::Range;

use weftgrad::{
    distributed::{
        comm::{Collectives, Comm, Communicator, Ranks},
        mesh::Mesh,
        pipeline::{Limits, Lowering, MicroBatches, PipeShape, PipelineModel, ScheduleKind},
        plan::Axis,
        train::Loss,
    },
    fused::{CrossEntropyOptions, Reduction},
    models::{ConfigFields, Decoder, JsonObject, Pretrained},
    nn::{
        Init,
        parallel::{TensorPlan, VocabularyLoss},
    },
    optim::AdamWConfig,
    prelude::*,
};

use crate::Outcome;

/// The size of the vocabulary.
pub const VOCAB: usize = 64;
/// The rows of a step, of all ranks together.
pub const ROWS: usize = 16;
/// The tokens of a row.
pub const TOKENS: usize = 12;

/// A random Llama of four layers; with `experts`, a Mixtral. Nothing is drawn before it is read.
pub fn decoder(comm: &Comm<Cpu>, experts: usize) -> Result<Decoder<Cpu>> {
    let family = if experts > 0 { "mixtral" } else { "llama" };
    let mut fields = serde_json::Map::from_iter([("model_type".into(), family.into())]);
    let mixture = [("num_local_experts", experts), ("num_experts_per_tok", 2)];
    let sizes = [("vocab_size", VOCAB), ("num_hidden_layers", 4), ("hidden_size", 32), ("intermediate_size", 64)];
    let attention = [("num_attention_heads", 4), ("num_key_value_heads", 2), ("max_position_embeddings", 64)];
    let all = sizes.into_iter().chain(attention).chain(mixture.into_iter().filter(|_| experts > 0));
    fields.extend(all.map(|(name, size)| (name.to_owned(), size.into())));
    let init = Init::new(comm.runtime(), 1).dtype(DType::F64).lazily();
    Decoder::from_fields(&init, &ConfigFields::of(JsonObject::of("the model", fields)))
}

/// This rank's stages of a model, cut over a mesh by a plan, in the 1F1B schedule.
pub fn stages(
    mesh: &Mesh<Cpu>,
    model: Decoder<Cpu>,
    plan: &TensorPlan,
    micro_batches: usize,
) -> Result<PipelineModel<Cpu>> {
    let pipe = mesh.axis(Axis::Pipe);
    let shape = PipeShape { ranks: pipe.size(), stages_per_rank: 1, micro_batches };
    let schedule = ScheduleKind::OneFOneB.generate(shape)?.lower(Lowering::default())?.check(Limits::default())?;
    let (stages, loss) = model.split_with_loss(pipe.size(), summed())?;
    PipelineModel::on(pipe.rank(), schedule, stages)
        .loss(move |y, t| Loss::sum(loss.of(&y[0], &t[0])?, t[0].spec().shape.numel() as f64))
        .parallelize(mesh, plan)
}

/// Tokens and next tokens of some rows of a step, `[B, T]`.
pub fn batch(comm: &Comm<Cpu>, step: usize, rows: Range<usize>) -> Result<[Tensor<Cpu>; 2]> {
    let token = |row: usize, at: usize| (((step * ROWS + row) % 7 + 1) * at * at + 3 * row + at) % VOCAB;
    let of = |from: usize| {
        let all: Vec<i64> =
            rows.clone().flat_map(|row| (from..from + TOKENS).map(move |at| token(row, at) as i64)).collect();
        Tensor::from_slice(comm.runtime(), [rows.len(), TOKENS], &all)
    };
    Ok([of(0)?, of(1)?])
}

/// Micro-batches of a pipeline, of the same rows as [`batch`]'s.
pub fn micro_batches(comm: &Comm<Cpu>, step: usize, rows: Range<usize>, count: usize) -> Result<MicroBatches<Cpu>> {
    let batch = batch(comm, step, rows)?;
    MicroBatches::split(&batch[..1], &batch[1..], count)
}

/// The rows of one rank, of the ranks that read different examples.
pub fn share(batch: &Comm<Cpu>) -> Range<usize> {
    let each = ROWS / batch.size();
    batch.rank() * each..(batch.rank() + 1) * each
}

/// The summed loss of a model on rows, weighted by their tokens.
pub fn loss(model: &Decoder<Cpu>, [x, y]: [Tensor<Cpu>; 2]) -> Result<Loss<Cpu>> {
    let logits = model.forward(&Var::new(x))?;
    let tokens = y.shape().numel() as f64;
    Loss::sum(model.next_token_loss(&logits, &Var::new(y), &summed())?, tokens)
}

fn summed() -> VocabularyLoss {
    let cross_entropy = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    VocabularyLoss { cross_entropy, ..Default::default() }
}

/// AdamW with this learning rate.
pub fn adamw(lr: f64) -> AdamWConfig {
    AdamWConfig { lr, ..Default::default() }
}

/// The numbers of all ranks, in their order.
pub fn of_all(comm: &Comm<Cpu>, number: f64) -> Result<Vec<f64>> {
    let all = comm.exchange(&number.to_le_bytes())?;
    Ok(all.iter().filter_map(|bytes| Some(f64::from_le_bytes(*bytes.first_chunk()?))).collect())
}

/// Runs a program on ranks that are threads; returns the result of rank 0.
pub fn on_ranks<T: Send>(ranks: usize, program: impl Fn(Comm<Cpu>) -> Result<T> + Sync) -> Result<T> {
    Ranks::new(ranks).run(|_| Ok(Cpu::with_threads(1)), program).map(|mut all| all.swap_remove(0))
}

/// Prints numbers of steps beside those of a reference; an error if they differ by more than rounding in `f64`.
pub fn compare(what: &str, many: &[f64], one: &[f64]) -> Outcome<()> {
    println!("step   reference    {what}");
    many.iter().zip(one).enumerate().for_each(|(step, (many, one))| println!("{step:4}   {one:.8}   {many:.8}"));
    let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-9 * b.abs().max(1.0);
    match many.len() == one.len() && many.iter().zip(one).all(close) {
        true => Ok(()),
        false => Err(format!("{what}: {many:?} are not {one:?}").into()),
    }
}
