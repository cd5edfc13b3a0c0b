//! Exported models that train: on many ranks as on one, and on from a checkpoint.

use std::sync::Mutex;

use autograd::Var;
use distributed::{
    checkpoint::Folder,
    comm::{Comm, Communicator, Ranks},
    train::{Loss, TrainStep},
    zero::ZeroStage,
};
use models_import::OnnxModel;
use nn::{ModuleExt, Stage};
use numcore::{
    DType, Result, Tensor,
    ops::{PointwiseOps, ReduceOps, ViewOps},
};
use optim::SgdConfig;
use runtime_cpu::Cpu;

use crate::common::*;

/// The mean square of some rows of the output for random rows of a step.
fn loss(model: &OnnxModel<Cpu>, step: usize, first: usize, rows: usize) -> Result<Loss<Cpu>> {
    let rt = cpu();
    let x = match model.inputs()[0].dtype {
        Some(DType::I64) => {
            let ids = Tensor::uniform(&rt, [4, 6], DType::F32, 0.0, 19.9, step as u64)?;
            ids.floor()?.to_dtype(DType::I64)?
        }
        _ => Tensor::normal(&rt, [4, 6], DType::F32, 0.0, 1.0, step as u64)?,
    };
    let y = model.forward_values(&[Var::new(x.narrow(0, first, rows)?)])?.remove(0);
    Loss::sum(y.sub(0.5)?.square()?.sum_all()?, rows as f64)
}

/// The state after these steps, on some ranks, which go on from one folder and save into another.
fn train(
    name: &str,
    ranks: usize,
    steps: std::ops::Range<usize>,
    from: Option<&Folder>,
    to: Option<&Folder>,
) -> Vec<(String, Tensor<Cpu>)> {
    let state = Mutex::new(Vec::new());
    let program = |comm: Comm<Cpu>| {
        let model = OnnxModel::load(path(name), comm.runtime())?;
        model.eval();
        let mut step = TrainStep::builder(&comm, &model)
            .optimizer(SgdConfig { lr: 0.01, momentum: 0.9, ..Default::default() })
            .zero(ZeroStage::Gradients)
            .build()?;
        if let Some(folder) = from {
            assert!(step.load(folder)?.is_some());
        }
        let rows = 4 / comm.size();
        for k in steps.clone() {
            step.step(|_| loss(&model, k, comm.rank() * rows, rows))?;
        }
        if let Some(folder) = to {
            step.save(folder, &Default::default())?;
        }
        let whole = model.state_dict()?;
        if comm.rank() == 0 {
            *state.lock().unwrap() = whole;
        }
        Ok(())
    };
    Ranks::new(ranks).run(|_| Ok(Cpu::with_threads(1)), program).unwrap();
    state.into_inner().unwrap()
}

#[test]
fn sharded_ranks_train_as_one() {
    for name in ["mlp", "block_script"] {
        let (one, two, before) = (train(name, 1, 0..3, None, None), train(name, 2, 0..3, None, None), model(name));
        for (((name, a), (_, b)), (_, old)) in one.iter().zip(&two).zip(&before.state_dict().unwrap()) {
            close(name, a, b, 1e-5);
            assert_ne!(a.to_bytes().unwrap(), old.to_bytes().unwrap(), "{name} was not trained");
        }
    }
}

#[test]
fn a_checkpoint_goes_on_where_it_was_saved() {
    let folder = std::env::temp_dir().join(format!("weftgrad-onnx-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let checkpoints = Folder::new(&folder);
    train("mlp", 2, 0..2, None, Some(&checkpoints));
    let (resumed, whole) = (train("mlp", 2, 2..4, Some(&checkpoints), None), train("mlp", 2, 0..4, None, None));
    std::fs::remove_dir_all(&folder).unwrap();
    for ((name, a), (_, b)) in resumed.iter().zip(&whole) {
        assert_eq!(a.to_bytes().unwrap(), b.to_bytes().unwrap(), "{name}");
    }
}

#[test]
fn weights_are_saved_and_loaded_by_their_names() {
    let file = std::env::temp_dir().join(format!("weftgrad-onnx-{}.safetensors", std::process::id()));
    let (saved, loaded) = (model("cnn"), model("cnn"));
    for (_, parameter) in saved.named_parameters() {
        parameter.set(parameter.value().unwrap().mul(0.5).unwrap()).unwrap();
    }
    saved.save_safetensors(&file).unwrap();
    loaded.load_safetensors(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let (saved, loaded) = (saved.state_dict().unwrap(), loaded.state_dict().unwrap());
    assert_eq!(saved.len(), 13);
    for ((name, a), (other, b)) in saved.iter().zip(&loaded) {
        assert_eq!((name, a.to_bytes().unwrap()), (other, b.to_bytes().unwrap()));
    }
}
