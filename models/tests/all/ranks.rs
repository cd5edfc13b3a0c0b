//! Pretrained models on many ranks: read lazily, into each rank's pieces.

use autograd::Var;
use distributed::{
    checkpoint::{CheckpointReader, Folder},
    comm::{Communicator, Ranks},
    train::{Loss, TrainStep},
    zero::{UnitOf, ZeroOptions, ZeroStage},
};
use models::{Decoder, Pretrained, SaveOptions};
use nn::{Init, Module, loss::cross_entropy_with};
use numcore::{
    Result, Runtime, Tensor,
    fused::{CrossEntropyOptions, Reduction},
    ops::ViewOps,
};
use optim::SgdConfig;
use runtime_cpu::Cpu;

use crate::common::*;

/// The summed loss of some rows of the reference's tokens.
fn loss(model: &Decoder<Cpu>, ids: &Tensor<Cpu>, first: usize, rows: usize) -> Result<Loss<Cpu>> {
    use nn::Forward;
    let ids = Var::new(ids.narrow(0, first, rows)?);
    let t = ids.dims()[1];
    let logits = model.forward(&ids)?.narrow(1, 0, t - 1)?;
    let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    Loss::sum(cross_entropy_with(&logits, &ids.narrow(1, 1, t - 1)?, options)?, (rows * (t - 1)) as f64)
}

#[test]
fn each_stage_trains_what_it_reads_lazily_and_saves_it_whole() {
    for (name, stage) in
        [("llama", ZeroStage::Parameters), ("gpt2", ZeroStage::Parameters), ("qwen2", ZeroStage::Gradients)]
    {
        let ids = Reference::read(name).tensor("ids");
        let train = |ranks: usize, folder: &Scratch| {
            let program = |comm: distributed::comm::Comm<Cpu>| {
                let init = Init::new(comm.runtime(), 0).lazily();
                let model = Decoder::from_pretrained(reference(name), &init)?;
                assert_eq!(comm.runtime().memory().total.live, 0);
                let options = ZeroOptions { stage, units: UnitOf::layers(), ..Default::default() };
                let mut step = TrainStep::builder(&comm, &model)
                    .optimizer(SgdConfig { lr: 0.1, ..Default::default() })
                    .zero(options)
                    .build()?;
                let before = Scratch::new();
                let options = SaveOptions { writes: comm.rank() == 0, ..Default::default() };
                model.save_pretrained_with(&before.0, &options)?;
                if comm.rank() == 0 {
                    same_tensors(&weight_files(&reference(name)), &weight_files(&before.0));
                }
                let rows = 2 / comm.size();
                step.step(|_| loss(&model, &ids.to_device(comm.runtime())?, comm.rank() * rows, rows))?;
                model.save_pretrained_with(&folder.0, &options)
            };
            Ranks::new(ranks).run(|_| Ok(Cpu::with_threads(1)), program).unwrap();
        };
        let (one, two) = (Scratch::new(), Scratch::new());
        train(1, &one);
        train(2, &two);
        let weights = |folder: &Scratch| nn::ModuleExt::state_dict(&from(&folder.0)).unwrap();
        let (one, two, before) = (weights(&one), weights(&two), nn::ModuleExt::state_dict(&decoder(name)).unwrap());
        for (((name, a), (_, b)), (_, old)) in one.iter().zip(&two).zip(&before) {
            close(name, a, b, 1e-4);
            assert_ne!(a.to_bytes().unwrap(), old.to_bytes().unwrap(), "{name} was not trained");
        }
    }
}

fn from(folder: &std::path::Path) -> Decoder<Cpu> {
    Decoder::from_pretrained(folder, &init()).unwrap()
}

/// Loading keeps one weight in memory besides the model.
#[test]
fn loading_takes_one_weight_more_than_the_model() {
    let rt = Cpu::with_threads(1);
    let model = Decoder::from_pretrained(reference("llama"), &Init::new(&rt, 0)).unwrap();
    let memory = rt.memory().total;
    let largest = 43 * 12 * 4;
    // Pools round sizes up.
    assert!(memory.peak <= memory.live + 2 * largest, "{} at the most, {} stay", memory.peak, memory.live);
    let _: &dyn Module<Cpu> = &model;
}

/// Of a checkpoint that shards wrote the parameters alone, by other names and in another element type.
#[test]
fn parameters_come_out_of_a_checkpoint_by_other_names() {
    let (folder, saved) = (Scratch::new(), Scratch::new());
    let program = |comm: distributed::comm::Comm<Cpu>| {
        let model = Decoder::from_pretrained(reference("llama"), &Init::new(comm.runtime(), 0).lazily())?;
        let step = TrainStep::builder(&comm, &model)
            .optimizer(SgdConfig { lr: 0.1, ..Default::default() })
            .zero(ZeroStage::Parameters)
            .build()?;
        step.save(&Folder::new(&folder.0), &Default::default())?;
        model.save_pretrained_with(&saved.0, &SaveOptions { writes: comm.rank() == 0, ..Default::default() })
    };
    Ranks::new(2).run(|_| Ok(Cpu::with_threads(1)), program).unwrap();
    let step = Folder::new(&folder.0).latest().unwrap().unwrap();
    let mut reader = CheckpointReader::open(Folder::new(&folder.0).step(step)).unwrap();
    let config = decoder("llama").config().clone();
    let target = Decoder::new(&Init::new(&cpu(), 9).dtype(numcore::DType::F64), config).unwrap();
    // The head of the new model comes from the saved token embedding; a norm stays as it is.
    let rename = |name: &str| match name {
        "lm_head.weight" => Some("embed_tokens.weight".to_owned()),
        "norm.weight" => None,
        other => Some(other.to_owned()),
    };
    let norm = nn::ModuleExt::state_dict(&target).unwrap().into_iter().find(|(n, _)| n == "norm.weight").unwrap().1;
    reader.load_parameters(&target, rename).unwrap();
    let state = nn::ModuleExt::state_dict(&target).unwrap();
    let due = nn::ModuleExt::state_dict(&decoder("llama")).unwrap();
    for ((name, a), (_, b)) in state.iter().zip(&due) {
        let b = match &**name {
            "lm_head.weight" => &due[0].1,
            "norm.weight" => &norm,
            _ => b,
        };
        close(name, a, b, 0.0);
    }
    let error = reader.load_parameters(&target, |name| Some(format!("x.{name}"))).unwrap_err().to_string();
    assert!(error.contains("norm.weight is missing under the name parameter/x.norm.weight"), "{error}");
    let narrow = |name: &str| (name == "norm.weight").then(|| "lm_head.weight".to_owned());
    let error = reader.load_parameters(&target, narrow).unwrap_err().to_string();
    assert!(error.contains("norm.weight is [12] here, and parameter/lm_head.weight is [43, 12]"), "{error}");
}
