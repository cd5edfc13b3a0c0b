//! Captured steps beside other queues: memory of theirs, events, panics.
#![cfg(feature = "emulate")]

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::LazyLock,
};

use autograd::{Var, manual_seed, next_seed, random_state, set_random_state};
use nn::{BatchNorm, Dropout, Forward, Init, Linear, ModuleExt, Sequential};
use numcore::{
    DType, Flat, FlatLayout, MemoryCategory, Result, Runtime, Shape, Tensor,
    ops::{IndexOps, PointwiseOps, ReduceOps, ViewOps},
};
use optim::{
    AdamW, AdamWConfig, Combined, Cosine, FlatOptimizer, NormOrder, Optimizer, Sgd, SgdConfig, clip_grad_norm,
};
use runtime_cuda::Cuda;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated"));

fn watched() -> Result<Cuda> {
    emulated_gpu::watched(&*FOLDER).map(|(cuda, _)| cuda)
}

fn filled(rt: &Cuda, value: f32) -> Result<Tensor<Cuda>> {
    Tensor::from_slice(rt, [5000], &[value; 5000])
}

/// A batch of a loader's queue that the step drops stays with the graph, and later batches get other memory.
#[test]
fn memory_of_another_queue_is_dropped_in_a_step() -> Result<()> {
    let cuda = watched()?;
    let loader = cuda.fork()?;
    let x = filled(&cuda, 1.0)?;
    let step = |batch: Tensor<Cuda>| x.add(&batch)?.mul(&batch);
    for _ in 0..2 {
        let batch = filled(&loader, 2.0)?;
        cuda.wait(&loader.record()?)?;
        assert_eq!(step(batch)?.to_vec::<f32>()?[4999], 6.0);
    }
    let batch = filled(&loader, 3.0)?;
    cuda.wait(&loader.record()?)?;
    let (graph, y) = cuda.capture(|| step(batch))?;
    let later: Vec<Tensor<Cuda>> = (0..4).map(|_| filled(&loader, 100.0)).collect::<Result<_>>()?;
    cuda.wait(&loader.record()?)?;
    graph.launch()?;
    assert_eq!(y.to_vec::<f32>()?, [12.0; 5000]);
    let reserved = loader.memory().reserved;
    drop((graph, y, later));
    // The block is back: no new one is needed for five tensors.
    let again: Vec<Tensor<Cuda>> = (0..5).map(|_| filled(&loader, 1.0)).collect::<Result<_>>()?;
    assert_eq!(loader.memory().reserved, reserved);
    drop(again);
    Ok(())
}

#[test]
fn a_step_waits_for_no_queue_outside_of_it_and_none_for_the_step() -> Result<()> {
    let cuda = watched()?;
    let other = cuda.fork()?;
    let x = filled(&cuda, 1.0)?;
    x.add(&x)?.add(&x)?;
    let outside = other.record()?;
    let mut inside = None;
    let (graph, y) = cuda.capture(|| {
        let y = x.add(&x)?;
        let error = cuda.wait(&outside).unwrap_err().to_string();
        assert!(error.contains("wait") && error.contains("a captured step cannot wait for other queues"), "{error}");
        let event = cuda.record()?;
        cuda.wait(&event)?;
        inside = Some(event);
        y.add(&x)
    })?;
    // What was recorded is a point of the step, not of the queue.
    let inside = inside.expect("the step has run");
    for queue in [&cuda, &other] {
        let error = queue.wait(&inside).unwrap_err().to_string();
        assert!(error.contains("nothing outside of it can wait for"), "{error}");
    }
    graph.launch()?;
    assert_eq!(y.to_vec::<f32>()?, [3.0; 5000]);
    Ok(())
}

/// A queue that waits for the step takes part in it, and the step's end waits for it: its memory, its random values and
/// its reports are those of the step.
#[test]
fn another_queue_takes_part_in_a_step() -> Result<()> {
    let (cuda, order) = emulated_gpu::watched(&*FOLDER)?;
    let other = cuda.fork()?;
    let layout = FlatLayout::new(DType::F32, [("x".to_string(), Shape::new(&[5000])?)]);
    let mut x = Flat::zeros_for(&cuda, MemoryCategory::Activations, layout)?;
    let rows = Tensor::from_slice(&cuda, [3], &[0i64, 7, 2])?;
    let drawn = |rt: &Cuda| Tensor::uniform(rt, [5000], DType::F32, 0.0, 1.0, 7);
    let step = |x: &Flat<Cuda>| {
        let (x, before) = (x.tensor(0)?, cuda.record()?);
        let doubled = x.add(&x)?;
        other.wait(&cuda.record()?)?;
        other.wait(&before)?;
        // On the other queue, beside the first: a value of the first, and random ones.
        let there = drawn(&other)?.mul(&x)?;
        let picked = there.narrow(0, 0, 5)?.index_select(0, &rows)?;
        cuda.wait(&other.record()?)?;
        Ok((doubled.add(&there)?, picked))
    };
    for _ in 0..2 {
        let (_, picked) = step(&x)?;
        assert!(picked.to_vec::<f32>().unwrap_err().to_string().contains("out of range"));
    }
    let (graph, (y, picked)) = cuda.capture(|| step(&x))?;
    for value in [1.0f32, 3.0] {
        x.overwrite(0, &filled(&cuda, value)?)?;
        graph.launch_with_seeds(|| 7)?;
        // Later work of the other queue comes after the launch.
        let later = Tensor::zeros(&other, [5000], DType::F32)?.add(&y)?;
        let expected: Vec<f32> = drawn(&cuda)?.to_vec::<f32>()?.into_iter().map(|u| 2.0 * value + value * u).collect();
        assert_eq!(y.to_vec::<f32>()?, expected);
        // Once a launch, by the queue that met it.
        assert!(picked.to_vec::<f32>().unwrap_err().to_string().contains("out of range"));
        assert_eq!(picked.to_vec::<f32>()?.len(), 3);
        assert_eq!(later.to_vec::<f32>()?, expected);
    }
    assert_eq!(order.complaints(), Vec::<String>::new());
    Ok(())
}

#[test]
fn a_panic_in_a_step_ends_its_capture() -> Result<()> {
    let cuda = watched()?;
    let x = filled(&cuda, 1.0)?;
    x.add(&x)?;
    let step = || cuda.capture(|| -> Result<Tensor<Cuda>> { panic!("on purpose, after {:?}", x.add(&x)?.dtype()) });
    assert!(catch_unwind(AssertUnwindSafe(step)).is_err());
    assert_eq!(x.to_dtype(DType::F64)?.to_vec::<f64>()?[0], 1.0, "the queue goes on");
    let (graph, y) = cuda.capture(|| x.add(&x))?;
    graph.launch()?;
    assert_eq!(y.to_vec::<f32>()?[0], 2.0);
    Ok(())
}

/// Numbers of the host that change from step to step are refused by name: those of a launch would be those of the capture.
#[test]
fn numbers_that_change_are_refused() -> Result<()> {
    let cuda = watched()?;
    let model = Linear::new(&Init::new(&cuda, 0), 3, 2)?;
    let x = Var::new(Tensor::from_slice(&cuda, [4, 3], &[0.5f32; 12])?);
    let loss = || model.forward(&x)?.square()?.sum_all();

    let mut adam = AdamW::new(&model, AdamWConfig::default())?;
    for _ in 0..2 {
        adam.backward(&loss()?)?;
        adam.step()?;
    }
    adam.backward(&loss()?)?;
    let error = cuda.capture(|| adam.step()).err().unwrap().to_string();
    assert!(error.contains("AdamW") && error.contains("the number of steps"), "{error}");

    let error = adam.advance().unwrap_err().to_string();
    assert!(error.contains("no update of it was captured"), "{error}");

    let drawn = || Tensor::uniform(&cuda, [100], DType::F32, 0.0, 1.0, 7);
    drawn()?;
    let (graph, x) = cuda.capture(drawn)?;
    let error = graph.launch().unwrap_err().to_string();
    assert!(error.contains("`launch_with_seeds`"), "{error}");
    for seed in [7, 8] {
        graph.launch_with_seeds(|| seed)?;
        assert_eq!(x.to_vec::<f32>()?, Tensor::uniform(&cuda, [100], DType::F32, 0.0, 1.0, seed)?.to_vec::<f32>()?);
    }
    Ok(())
}

/// A step with everything that changes from one to the next: Adam's bias corrections, a learning rate that follows a schedule, weight decay,
/// dropout, clipping; in full and in half precision. Each launch is what the next step would be, to the bit.
#[test]
fn a_step_of_adamw_with_a_schedule_and_dropout_is_launched_again_and_again() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let plain = trained(dtype, false, 6)?;
        assert_eq!(trained(dtype, true, 6)?, plain, "{dtype}");
        assert!(plain.windows(2).all(|two| two[0] != two[1]), "every step has another loss: {plain:?}");
    }
    Ok(())
}

/// Losses of `steps` steps after the first two, and what the optimizer says of itself at the end.
fn trained(dtype: DType, captured: bool, steps: usize) -> Result<Vec<String>> {
    manual_seed(3);
    let cuda = watched()?;
    let init = Init::new(&cuda, 0).dtype(dtype);
    let model =
        Sequential::new().push(Linear::new(&init, 3, 8)?).push(Dropout::new(0.3)?).push(Linear::new(&init, 8, 2)?);
    let x = Var::new(Tensor::from_slice(&cuda, [4, 3], &[0.5f32; 12])?.to_dtype(dtype)?);
    let config = AdamWConfig { lr: 0.05, weight_decay: 0.1, ..Default::default() };
    let mut adam = AdamW::new(&model, config)?.scheduled(Cosine { t_max: 40, eta_min: 0.0 }).capturable();
    let step = |adam: &mut AdamW<Cuda>| {
        let loss = model.forward(&x)?.square()?.to_dtype(DType::F32)?.sum_all()?;
        adam.backward(&loss)?;
        clip_grad_norm(adam.gradients()?, 0.5, NormOrder::L2)?;
        adam.step()?;
        loss.value()
    };
    (0..2).try_for_each(|_| step(&mut adam).map(drop))?;
    let mut losses = Vec::new();
    if captured {
        let before = random_state();
        let (graph, loss) = cuda.capture(|| step(&mut adam))?;
        set_random_state(before);
        for _ in 0..steps {
            adam.advance()?;
            graph.launch_with_seeds(next_seed)?;
            losses.push(format!("{:?}", loss.item()?));
        }
    } else {
        for _ in 0..steps {
            losses.push(format!("{:?}", step(&mut adam)?.item()?));
        }
    }
    losses.push(format!("{:?} {:?} {:?}", adam.steps(), adam.lrs(), random_state()));
    for (name, tensor) in adam.state_dict()? {
        losses.push(format!("{name} {:?}", tensor.to_f64s()?));
    }
    Ok(losses)
}

/// A captured step has one step number for the parameters of a group, which have had as many updates each.
#[test]
fn parameters_with_different_counts_of_updates_are_refused() -> Result<()> {
    let cuda = watched()?;
    let model = Linear::new(&Init::new(&cuda, 0), 3, 2)?;
    let x = Var::new(Tensor::from_slice(&cuda, [4, 3], &[0.5f32; 12])?);
    let mut adam = AdamW::new(&model, AdamWConfig::default())?.capturable();
    let alone = model.parameters()[0].var();
    adam.backward(&alone.square()?.sum_all()?)?;
    adam.step()?;
    let mut step = || {
        adam.backward(&model.forward(&x)?.square()?.sum_all()?)?;
        adam.step()
    };
    (0..2).try_for_each(|_| step())?;
    let error = cuda.capture(step).err().unwrap().to_string();
    assert!(error.contains("adamw") && error.contains("different numbers of updates"), "{error}");
    Ok(())
}

/// Values that were replaced move into the optimizer's memory in the next step, which every launch would repeat.
#[test]
fn weights_that_were_replaced_are_not_captured() -> Result<()> {
    let cuda = watched()?;
    let model = Linear::new(&Init::new(&cuda, 0), 3, 2)?;
    let x = Var::new(Tensor::from_slice(&cuda, [4, 3], &[0.5f32; 12])?);
    let mut sgd = Sgd::new(&model, SgdConfig { lr: 0.1, ..Default::default() })?;
    let mut step = || {
        sgd.backward(&model.forward(&x)?.square()?.sum_all()?)?;
        sgd.step()
    };
    (0..2).try_for_each(|_| step().map(drop))?;
    let values: Vec<(String, Tensor<Cuda>)> =
        model.state_dict()?.into_iter().map(|(name, value)| Ok((name, value.copy()?))).collect::<Result<_>>()?;
    model.load_state_dict(values)?;
    let error = cuda.capture(&mut step).err().expect("replaced").to_string();
    assert!(error.contains("were replaced") && error.contains("take a step before"), "{error}");
    step()?;
    cuda.capture(&mut step).map(drop)
}

/// A whole step of an optimizer without such numbers, launched as often as it is run.
#[test]
fn a_step_of_sgd_is_launched_again_and_again() -> Result<()> {
    let train = |captured: bool| -> Result<Vec<f32>> {
        let cuda = watched()?;
        let model = Linear::new(&Init::new(&cuda, 0), 3, 2)?;
        let x = Var::new(Tensor::from_slice(&cuda, [4, 3], &[0.5f32; 12])?);
        let mut sgd = Sgd::new(&model, SgdConfig { lr: 0.1, ..Default::default() })?;
        let step = |sgd: &mut Sgd<Cuda>| {
            sgd.backward(&model.forward(&x)?.square()?.sum_all()?)?;
            sgd.step()
        };
        (0..2).try_for_each(|_| step(&mut sgd).map(drop))?;
        match captured {
            false => (0..3).try_for_each(|_| step(&mut sgd).map(drop))?,
            true => {
                let (graph, ()) = cuda.capture(|| step(&mut sgd))?;
                assert_eq!(sgd.steps(), 2, "a captured update has not happened");
                (0..3).try_for_each(|_| sgd.advance().and_then(|()| graph.launch()))?;
            }
        }
        assert_eq!(sgd.steps(), 5);
        let weights = model.parameters().into_iter().map(|p| p.leaf().value()?.to_vec::<f32>());
        Ok(weights.collect::<Result<Vec<_>>>()?.concat())
    };
    assert_eq!(train(true)?, train(false)?);
    Ok(())
}

/// Running statistics are read and written by each launch, in their own memory.
#[test]
fn running_statistics_move_with_every_launch() -> Result<()> {
    let train = |captured: bool| -> Result<Vec<Vec<f64>>> {
        let cuda = watched()?;
        let model = BatchNorm::new(&Init::new(&cuda, 0), 3)?;
        let x = Var::new(Tensor::uniform(&cuda, [8, 3], DType::F32, -1.0, 3.0, 5)?);
        let mut sgd = Sgd::new(&model, SgdConfig { lr: 0.1, ..Default::default() })?;
        let mut step = || {
            sgd.backward(&model.forward(&x)?.square()?.sum_all()?)?;
            sgd.step()
        };
        (0..2).try_for_each(|_| step().map(drop))?;
        match captured {
            false => (0..6).try_for_each(|_| step().map(drop))?,
            true => {
                let (graph, _) = cuda.capture(&mut step)?;
                (0..3).try_for_each(|_| graph.launch())?;
                // A step by itself between launches: they go on from its statistics.
                step()?;
                (0..2).try_for_each(|_| graph.launch())?;
                // A value that somebody holds cannot change in a launch.
                let held = model.running_mean.value();
                let error = cuda.capture(&mut step).err().expect("held").to_string();
                assert!(error.contains("captured steps") && error.contains("another holder"), "{error}");
                drop(held);
            }
        }
        model.state_dict()?.into_iter().map(|(_, value)| value.to_f64s()).collect()
    };
    assert_eq!(train(true)?, train(false)?);
    Ok(())
}

/// A loader that needs new memory waits for the capture; the step drops a batch of the loader's meanwhile.
#[test]
fn a_loader_allocates_while_a_step_is_captured() -> Result<()> {
    let cuda = watched()?;
    let loader = cuda.fork()?;
    let x = filled(&cuda, 1.0)?;
    let batch = || filled(&loader, 2.0);
    for _ in 0..2 {
        x.add(&batch()?)?;
    }
    let kept = batch()?;
    cuda.wait(&loader.record()?)?;
    let later = std::thread::scope(|scope| -> Result<Tensor<Cuda>> {
        let (graph, (y, later)) = cuda.capture(|| {
            // Larger than any block the loader's pool holds.
            let later = scope.spawn(|| Tensor::<Cuda>::zeros(&loader, [1 << 20], DType::F32));
            std::thread::sleep(std::time::Duration::from_millis(50));
            let y = x.add(&kept)?;
            drop(kept);
            Ok((y, later))
        })?;
        let later = later.join().expect("the loader goes on")?;
        graph.launch()?;
        assert_eq!(y.to_vec::<f32>()?, [3.0; 5000]);
        Ok(later)
    })?;
    assert_eq!(later.shape().numel(), 1 << 20);
    Ok(())
}

/// Where the numbers of one part cannot be uploaded, no part has moved on: trying again gives the losses of the steps themselves.
#[test]
fn an_advance_that_fails_changes_nothing() -> Result<()> {
    for combined in [false, true] {
        let plain = launched(combined, false)?;
        assert_eq!(launched(combined, true)?, plain, "combined: {combined}");
        assert!(plain.windows(2).all(|two| two[0] != two[1]), "{plain:?}");
    }
    Ok(())
}

/// Losses of captured steps of two groups, or of two optimizers; before each launch, advances fail at each of their uploads if `fails`.
fn launched(combined: bool, fails: bool) -> Result<Vec<f64>> {
    let (cuda, order) = emulated_gpu::watched(&*FOLDER)?;
    let model = Linear::new(&Init::new(&cuda, 0), 3, 2)?;
    let x = Var::new(Tensor::from_slice(&cuda, [4, 3], &[0.5f32; 12])?);
    let leaves: Vec<_> = model.parameters().iter().map(|p| p.leaf().clone()).collect();
    let config = AdamWConfig { lr: 0.05, ..Default::default() };
    let over = |leaves: &[_]| AdamW::over(config.clone(), leaves.to_vec()).map(|o| o.capturable());
    let mut adam: Box<dyn Optimizer<Cuda>> = match combined {
        true => Box::new(Combined::new(vec![Box::new(over(&leaves[..1])?), Box::new(over(&leaves[1..])?)])?),
        false => {
            let groups = FlatOptimizer::in_groups(config.clone()).group(&leaves[..1], |_| {})?;
            Box::new(groups.group(&leaves[1..], |c| c.lr = 0.02)?.capturable())
        }
    };
    let step = |adam: &mut Box<dyn Optimizer<Cuda>>| {
        let loss = model.forward(&x)?.square()?.sum_all()?;
        adam.backward(&loss)?;
        adam.step()?;
        loss.value()
    };
    (0..2).try_for_each(|_| step(&mut adam).map(drop))?;
    let (graph, loss) = cuda.capture(|| step(&mut adam))?;
    let mut losses = Vec::new();
    for _ in 0..5 {
        for copies in if fails { 0..2 } else { 0..0 } {
            let before = (adam.steps(), format!("{:?}", states(&*adam)?));
            order.fail_copy_after(copies);
            let error = adam.advance().unwrap_err().to_string();
            assert!(error.contains("as was asked for"), "{error}");
            assert_eq!((adam.steps(), format!("{:?}", states(&*adam)?)), before);
        }
        adam.advance()?;
        graph.launch()?;
        losses.push(loss.item()?);
    }
    Ok(losses)
}

fn states(optimizer: &dyn Optimizer<Cuda>) -> Result<Vec<(String, Vec<f64>)>> {
    optimizer.state_dict()?.into_iter().map(|(name, state)| Ok((name, state.to_f64s()?))).collect()
}
