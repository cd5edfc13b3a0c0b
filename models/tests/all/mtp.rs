//! Multi-token prediction: logits, losses and gradients by the formulas of its report, files, packed rows, and steps
//! over ranks.

use std::slice::from_ref;

use autograd::Var;
use distributed::{
    comm::{Comm, Communicator, Ranks},
    context_parallel::ContextExchange,
    mesh::Mesh,
    pipeline::{Limits, Lowering, MicroBatches, PipeShape, PipelineModel, ScheduleKind},
    plan::{Axis, ParallelPlan},
    train::{Loss, TrainStep},
    zero::ZeroStage,
};
use models::{Decoder, DecoderInputs, Lora, LoraConfig, LoraTargets, Pretrained, mtp_targets};
use nn::{Init, ModuleExt, parallel::VocabularyLoss};
use numcore::{
    DType, Result, Tensor,
    fused::{CrossEntropyOptions, Reduction},
    ops::{PointwiseOps, ViewOps, cat},
    safetensors,
};
use optim::SgdConfig;
use runtime_cpu::Cpu;

use crate::common::*;

type Tensors = Vec<(String, Tensor<Cpu>)>;

const NAME: &str = "deepseek_v3_mtp";

fn loss(reduction: Reduction) -> VocabularyLoss {
    VocabularyLoss { cross_entropy: CrossEntropyOptions { reduction, ..Default::default() }, z_loss: 0.0 }
}

fn ids(rows: &[&[i64]]) -> V {
    let all: Vec<i64> = rows.concat();
    Var::new(Tensor::from_slice(&cpu(), [rows.len(), rows[0].len()], &all).unwrap())
}

/// Each token's next; the last of a row has none.
fn next(ids: &V) -> V {
    mtp_targets(ids, None, 1).unwrap()
}

/// The losses of the next token and of both depths together, as `next + 0.3 · mean`.
fn joint(
    model: &Decoder<Cpu>,
    [tokens, targets]: [&V; 2],
    inputs: impl Fn() -> DecoderInputs<'static, Cpu>,
    options: &VocabularyLoss,
) -> Result<V> {
    let states = model.states(tokens, inputs())?;
    let depths = model.mtp_states(&states, tokens, inputs())?;
    let first = model.next_token_loss(&model.logits(&states)?, targets, options)?;
    first.add(&model.mtp_loss(&depths, targets, None, options)?.mul(0.3)?)
}

#[test]
fn logits_and_gradients_are_those_of_the_formulas() {
    let (due, model) = (Reference::read(NAME), decoder(NAME));
    let ids = due.var("ids");
    let states = model.states(&ids, DecoderInputs::default()).unwrap();
    let depths = model.mtp_states(&states, &ids, DecoderInputs::default()).unwrap();
    assert_eq!((depths.len(), depths[1].routing.is_some()), (2, true));
    close("logits", &model.logits(&states).unwrap().value().unwrap(), &due.tensor("logits"), 2e-5);
    let mean = loss(Reduction::Mean);
    let losses = due.tensor("losses").to_f64s().unwrap();
    for (k, depth) in depths.iter().enumerate() {
        // The last states of a row were given no token.
        let logits = model.logits(&depth.states).unwrap().value().unwrap();
        let known = |x: &Tensor<Cpu>| x.narrow(1, 0, 12 - k).unwrap().contiguous().unwrap();
        close("further logits", &known(&logits), &known(&due.tensor(&format!("logits{}", k + 1))), 2e-5);
        let targets = mtp_targets(&next(&ids), None, k + 1).unwrap();
        let got = model.next_token_loss(&Var::new(logits), &targets, &mean).unwrap().value().unwrap();
        assert!((got.to_f64s().unwrap()[0] - losses[k + 1]).abs() < 1e-5);
    }
    let sum = joint(&model, [&ids, &next(&ids)], DecoderInputs::default, &mean).unwrap();
    let want = losses[0] + 0.15 * (losses[1] + losses[2]);
    assert!((sum.value().unwrap().to_f64s().unwrap()[0] - want).abs() < 1e-5);
    check_grads(&model, &sum, &due, |theirs| {
        let stacked = theirs.strip_prefix("model.").filter(|ours| model.table().stack(ours).is_some());
        (stacked.map_or_else(|| model.table().ours(theirs).unwrap().name, str::to_owned), false)
    });
}

#[test]
fn files_have_the_layers_or_lack_them() {
    let scratch = Scratch::new();
    decoder(NAME).save_pretrained(&scratch.0).unwrap();
    let again = Decoder::from_pretrained(&scratch.0, &init()).unwrap();
    let values = |model: &Decoder<Cpu>| {
        let bytes = |(name, value): (String, Tensor<Cpu>)| (name, value.to_bytes().unwrap());
        model.state_dict().unwrap().into_iter().map(bytes).collect::<Vec<_>>()
    };
    assert_eq!(values(&again), values(&decoder(NAME)));
    assert_eq!(again.config().options.mtp_layers, 2);
    // Copies of the embedding and the head are left out.
    let (model, report) = Decoder::from_pretrained_partly(reference(NAME), &init()).unwrap();
    assert!(report.ignored.len() == 4 && report.ignored.iter().all(|name| name.contains("layers.")));
    let path = |folder: &Scratch| folder.0.join("model.safetensors");
    let change = |change: &dyn Fn(&mut Tensors)| {
        let folder = Scratch::copy_of(NAME);
        let mut tensors = safetensors::load(path(&folder), &cpu()).unwrap();
        change(&mut tensors);
        safetensors::save(path(&folder), &tensors, &Default::default()).unwrap();
        folder
    };
    let folder = change(&|tensors| {
        let copy = tensors.iter_mut().find(|(name, _)| name == "model.layers.3.shared_head.head.weight").unwrap();
        copy.1 = copy.1.mul(2.0).unwrap();
    });
    let error = |folder: &Scratch| Decoder::from_pretrained(&folder.0, &init()).map(drop).unwrap_err().to_string();
    assert!(error(&folder).contains("is no copy of lm_head.weight"), "{}", error(&folder));
    // A model that does without these layers does not mind.
    let folder = folder.with_config(|fields| drop(fields.insert("num_nextn_predict_layers".into(), 0.into())));
    let plain = Decoder::from_pretrained(&folder.0, &init()).unwrap();
    assert_eq!(values(&plain), values(&decoder(NAME).without_mtp()));
    let folder = change(&|tensors| tensors.retain(|(name, _)| name != "model.layers.3.hnorm.weight"));
    assert!(error(&folder).contains("layers.3.hnorm.weight"), "{}", error(&folder));
    // Transformers writes the field, and none of the layers' weights.
    let folder = change(&|tensors| {
        tensors.retain(|(name, _)| !["model.layers.2.", "model.layers.3."].iter().any(|start| name.starts_with(start)));
    });
    let without = Decoder::from_pretrained(&folder.0, &init()).unwrap();
    assert_eq!(without.fields()["num_nextn_predict_layers"], 0);
    let model = model.without_mtp();
    assert_eq!((values(&without), without.config()), (values(&model), model.config()));
    // Files with more layers than their configuration.
    let folder = Scratch::copy_of(NAME).with_config(|fields| {
        fields.insert("num_nextn_predict_layers".into(), 1.into());
    });
    assert!(error(&folder).contains("unexpected"), "{}", error(&folder));
}

#[test]
fn packed_rows_are_rows_of_their_own() {
    let model = Decoder::from_pretrained(reference(NAME), &init().dtype(DType::F64)).unwrap();
    let (a, b): (&[i64], &[i64]) = (&[3, 9, 1, 22, 40, 7, 8], &[5, 5, 31, 2]);
    let sum = loss(Reduction::Sum);
    let of = |row: &[i64]| {
        let row = ids(&[row]);
        joint(&model, [&row, &next(&row)], DecoderInputs::default, &sum).unwrap().value().unwrap().to_f64s().unwrap()[0]
    };
    let tokens = ids(&[&[a, b].concat()]);
    let positions: Vec<i64> = (0..a.len() as i64).chain(0..b.len() as i64).collect();
    let segments: Vec<i64> = [vec![4; a.len()], vec![9; b.len()]].concat();
    let (positions, segments) = (ids(&[&positions]), ids(&[&segments]));
    let targets = cat(&[&next(&ids(&[a])), &next(&ids(&[b]))], 1).unwrap();
    let given = || DecoderInputs { positions: Some(&positions), segments: Some(&segments), cache: None };
    let states = model.states(&tokens, given()).unwrap();
    let depths = model.mtp_states(&states, &tokens, given()).unwrap();
    let first = model.next_token_loss(&model.logits(&states).unwrap(), &targets, &sum).unwrap();
    let further = model.mtp_loss(&depths, &targets, Some(&segments), &sum).unwrap();
    let got = first.add(&further.mul(0.3).unwrap()).unwrap().value().unwrap().to_f64s().unwrap()[0];
    assert!((got - of(a) - of(b)).abs() < 1e-12 * got, "{got}");
    // Rows that are too short for a depth have no targets there.
    assert_eq!(mtp_targets(&ids(&[&[3, 4]]), None, 5).unwrap().value().unwrap().to_vec::<i64>().unwrap(), [-100; 2]);
}

/// Rules of names in numbered layers tie no parameter of the model.
#[test]
fn a_head_is_trained_in_full_beside_adapters() {
    let config = LoraConfig {
        target_modules: LoraTargets::Names(vec!["eh_proj".into()]),
        modules_to_save: vec!["lm_head".into()],
        ..LoraConfig::default()
    };
    let (model, scratch) = (decoder(NAME), Scratch::new());
    let lora = Lora::new(&model, &init(), config).unwrap();
    lora.save(&scratch.0).unwrap();
    let names: Vec<_> = lora.named_parameters().into_iter().filter(|(_, p)| p.requires_grad()).collect();
    assert_eq!(names.len(), 5, "two adapters and the head");
    Lora::load(&decoder(NAME), &init(), &scratch.0).unwrap();
}

#[test]
fn what_cannot_be_predicted_is_an_error() {
    let (model, plain) = (decoder(NAME), decoder("llama"));
    let tokens = ids(&[&[1, 2, 3]]);
    let states = model.states(&tokens, DecoderInputs::default()).unwrap();
    let mut cache = model.cache(4, vec![0]);
    let cached = DecoderInputs { cache: Some(&mut cache), ..Default::default() };
    let error = model.mtp_states(&states, &tokens, cached).map(drop).unwrap_err().to_string();
    assert!(error.contains("has no cache"), "{error}");
    let error =
        model.mtp_states(&states, &ids(&[&[1, 2]]), DecoderInputs::default()).map(drop).unwrap_err().to_string();
    assert!(error.contains("layers.2"), "{error}");
    let states = plain.states(&tokens, DecoderInputs::default()).unwrap();
    let depths = plain.mtp_states(&states, &tokens, DecoderInputs::default()).unwrap();
    let error = plain.mtp_loss(&depths, &tokens, None, &loss(Reduction::Mean)).map(drop).unwrap_err().to_string();
    assert!(error.contains("was given no depths"), "{error}");
}

/// A way to train: the axes of ranks, and what is sharded or cut.
#[derive(Clone, Copy, Debug)]
struct Way {
    axes: &'static [(Axis, usize)],
    zero: ZeroStage,
    /// True if values between layers are cut along the sequence, all of which a mixture needs.
    sequence: bool,
    /// True if the head shares the weight of the embedding.
    tied: bool,
    /// True if the first rank of a pipeline has the last stage too.
    folded: bool,
}

impl Way {
    const fn of(axes: &'static [(Axis, usize)]) -> Self {
        Way { axes, zero: ZeroStage::None, sequence: false, tied: false, folded: false }
    }

    fn model(&self, rt: &Cpu) -> Result<Decoder<Cpu>> {
        let folder = Scratch::copy_of(NAME);
        let path = folder.0.join("model.safetensors");
        let folder = folder.with_config(|fields| {
            fields.insert("tie_word_embeddings".into(), self.tied.into());
            if self.sequence {
                fields.insert("first_k_dense_replace".into(), 4.into());
            }
        });
        let init = Init::new(rt, 3).dtype(DType::F64);
        if !self.sequence {
            if self.tied {
                let mut tensors = safetensors::load(&path, &cpu())?;
                tensors.retain(|(name, _)| !name.ends_with("head.weight"));
                safetensors::save(&path, &tensors, &Default::default())?;
            }
            return Decoder::from_pretrained(&folder.0, &init);
        }
        let config = models::DecoderConfig::read(&models::ConfigFields::open(&folder.0)?)?;
        Decoder::new(&init, config)
    }

    /// Losses and norms of three steps of rows `[4, 8]`.
    fn train(&self, comm: &Comm<Cpu>) -> Result<Vec<f64>> {
        let mesh = Mesh::new(comm, ParallelPlan::of(self.axes.to_vec())?)?;
        let (rt, pipe) = (comm.runtime(), mesh.axis(Axis::Pipe));
        let model = self.model(rt)?;
        let rows = 4 / mesh.batch().size();
        let tokens = |from: i64| {
            let all: Vec<i64> = (0..32).map(|i| (i * i * 7 + i + from) % 43).collect();
            let all = Tensor::from_slice(rt, [4, 8], &all)?;
            all.narrow(0, mesh.batch().rank() * rows, rows)?.contiguous()
        };
        let (x, y) = (tokens(0)?, tokens(5)?);
        let plan = Decoder::<Cpu>::tensor_plan().sequence_parallel(self.sequence);
        let (options, weight) = (loss(Reduction::Sum), 32.0 / mesh.batch().size() as f64);
        let sgd = SgdConfig { lr: 0.02, momentum: 0.5, ..Default::default() };
        let mut seen = Vec::new();
        if pipe.size() == 1 {
            mesh.parallelize(&model, &plan)?;
            mesh.context_parallel(&model, ContextExchange::AllGather)?;
            let mut step = TrainStep::builder(&mesh, &model).optimizer(sgd).max_norm(0.5).zero(self.zero).build()?;
            let (x, y) = (Var::new(x), Var::new(y));
            for _ in 0..3 {
                let metrics =
                    step.step(|_| Loss::sum(joint(&model, [&x, &y], DecoderInputs::default, &options)?, weight))?;
                seen.extend([metrics.loss()?, metrics.grad_norm()?.unwrap_or(0.0)]);
            }
            return Ok(seen);
        }
        let (kind, stages_per_rank, micro_batches) =
            if self.folded { (ScheduleKind::Zbv, 2, 4) } else { (ScheduleKind::OneFOneB, 1, 2) };
        let (stages, next) = model.split_with_loss(pipe.size() * stages_per_rank, options)?;
        // A stage alone is a pipeline of one.
        let stages = stages.into_iter().map(|stage| Ok(stage.split(1)?.remove(0))).collect::<Result<Vec<_>>>()?;
        let shape = PipeShape { ranks: pipe.size(), stages_per_rank, micro_batches };
        let schedule = kind.generate(shape)?.lower(Lowering::default())?.check(Limits::default())?;
        let of_batch = move |y: &[V], targets: &V| {
            let [first, depths @ ..] = y else { panic!("no logits") };
            let mut sum = next.of(first, targets)?;
            for (k, logits) in depths.iter().enumerate() {
                let further = next.of(logits, &mtp_targets(targets, None, k + 1)?)?;
                sum = sum.add(&further.mul(0.3 / depths.len() as f64)?)?;
            }
            Loss::sum(sum, targets.dims().iter().product::<usize>() as f64)
        };
        let model = PipelineModel::on(pipe.rank(), schedule, stages)
            .loss(move |y, t| of_batch(y, &t[0]))
            .parallelize(&mesh, &plan)?
            .context_parallel(&mesh, ContextExchange::AllGather)?;
        let builder = TrainStep::builder(&mesh, model).optimizer(sgd).max_norm(0.5);
        let mut step = builder.zero(self.zero).build()?;
        for _ in 0..3 {
            let metrics = step.step(|_| MicroBatches::split(from_ref(&x), from_ref(&y), micro_batches))?;
            seen.extend([metrics.loss()?, metrics.grad_norm()?.unwrap_or(0.0)]);
        }
        Ok(seen)
    }

    fn check(self) {
        let run = |way: Way| {
            let ranks = way.axes.iter().map(|(_, size)| size).product();
            let outcomes = Ranks::new(ranks).run(|_| Ok(cpu()), |comm| way.train(&comm));
            outcomes.unwrap_or_else(|error| panic!("{way:?}: {error}"))
        };
        let alone = run(Way { axes: &[(Axis::Data, 1)], zero: ZeroStage::None, ..self }).remove(0);
        assert!(alone[0] > alone[4], "{alone:?}");
        for got in run(self) {
            let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-10 * b.abs();
            assert!(got.len() == 6 && got.iter().zip(&alone).all(close), "{self:?}: {got:?} and {alone:?}");
        }
    }
}

#[test]
fn steps_over_ranks_are_those_of_one() {
    use Axis::{Context, Data, Shard, Tensor};
    Way { zero: ZeroStage::Parameters, ..Way::of(&[(Shard, 2)]) }.check();
    Way::of(&[(Data, 4)]).check();
    Way::of(&[(Tensor, 2)]).check();
    Way { sequence: true, ..Way::of(&[(Tensor, 2)]) }.check();
    Way::of(&[(Context, 2)]).check();
    Way { tied: true, ..Way::of(&[(Tensor, 2), (Context, 2)]) }.check();
}

#[test]
fn stages_predict_as_one_model() {
    use Axis::{Context, Data, Pipe, Shard, Tensor};
    const PLACES: [&[(Axis, usize)]; 5] =
        [&[(Pipe, 2)], &[(Pipe, 3)], &[(Pipe, 5)], &[(Pipe, 2), (Tensor, 2)], &[(Pipe, 2), (Context, 2)]];
    for (axes, tied) in PLACES.into_iter().flat_map(|axes| [(axes, false), (axes, true)]) {
        Way { tied, ..Way::of(axes) }.check();
    }
    Way { zero: ZeroStage::Parameters, ..Way::of(&[(Pipe, 2), (Shard, 2)]) }.check();
    Way { sequence: true, ..Way::of(&[(Pipe, 2), (Tensor, 2)]) }.check();
    Way::of(&[(Pipe, 2), (Data, 2)]).check();
    for tied in [false, true] {
        Way { tied, folded: true, ..Way::of(&[(Pipe, 2)]) }.check();
    }
}
