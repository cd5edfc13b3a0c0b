//! ZeRO: in which order units are gathered and sent.

use distributed::{strategy::BackwardPass, train::Strategy};

use crate::{between::Between, prelude::*, zero_memory::layers, zero_stages::options};

const LAYERS: u64 = 5;

#[test]
fn frozen_and_trained_parameters_of_a_layer_travel_once() {
    let counts = Ranks::new(2).run(cpu, |comm| {
        let counted = Arc::new(CountingCommunicator::new(comm.clone()));
        let (rt, comm) = (comm.runtime(), counted.clone() as Comm<Cpu>);
        // As adapters are: two frozen matrices, each followed by a trained one.
        let model = (0..LAYERS).map(|_| layers(rt, 4, DType::F32)).collect::<Result<Vec<_>>>()?;
        model.freeze_where(|name| name.contains(".0.") || name.contains(".2."));
        let config = TrainingConfig::default();
        let units = UnitOf::new(|name| name.split('.').next().unwrap_or_default().into());
        let mut trainer = sharded(&comm, &model, config, options(ZeroStage::Parameters, units))?;
        let mut counts = Vec::new();
        for _ in 0..3 {
            counted.reset();
            let mut forward = 0;
            trainer.step(|_| {
                let x = Var::new(Tensor::normal(rt, [4, 128], DType::F32, 0.0, 1.0, 1)?);
                let y = model.iter().flatten().try_fold(x, |x, layer| layer.forward(&x)?.tanh())?;
                let loss = Loss::mean(y.square()?.sum_all()?);
                forward = counted.of("all_gather").calls;
                Ok(loss)
            })?;
            counts.push([forward, counted.of("all_gather").calls, counted.of("reduce_scatter").calls]);
        }
        Ok(counts)
    });
    for counts in counts.unwrap() {
        // Two units a layer: all in forward, and in backward all but those of the last layer, which stay. In the first step nothing is known
        // of the order, and ranks agree on one at its end.
        assert_eq!(counts[0][0], 2 * LAYERS);
        assert_eq!(counts[1..], [[2 * LAYERS, 2 * LAYERS + 2 * (LAYERS - 1), LAYERS]; 2]);
    }
}

/// Declared in another order than it is computed in: the root, which is read first, comes last.
#[derive(Module)]
#[module(crate = "::nn")]
struct BlocksFirst<R: Runtime> {
    blocks: Vec<Linear<R>>,
    inwards: Linear<R>,
    outwards: Linear<R>,
}

const BLOCKS: usize = 6;
const BLOCK: usize = 128 * 128 * 4;
const ROOT: usize = 2 * 64 * 128 * 4;

#[test]
fn units_are_sent_in_the_order_in_which_they_become_ready() {
    for stage in [ZeroStage::Gradients, ZeroStage::Parameters] {
        for n in [1, 2, 3] {
            let peaks = Ranks::new(n).run(cpu, |comm| {
                let rt = comm.runtime();
                let init = Init::new(rt, 0);
                let linear = |width, height| Linear::new(&init, width, height).map(Linear::without_bias);
                let (blocks, inwards, outwards) = (layers(rt, BLOCKS, DType::F32)?, linear(64, 128)?, linear(128, 64)?);
                let model = BlocksFirst { blocks, inwards, outwards };
                let adamw = ParamGroups::new(AdamWConfig::default());
                let mut sharded = Sharded::new(&comm, &model, adamw, options(stage, UnitOf::layers()))?;
                let mut peaks = Vec::new();
                for _ in 0..3 {
                    sharded.prepare(ActiveRanks::All)?;
                    let x = Var::new(Tensor::normal(rt, [4, 64], DType::F32, 0.0, 1.0, 1)?);
                    let x = model.inwards.forward(&x)?;
                    let y = model.blocks.iter().try_fold(x, |x, layer| layer.forward(&x)?.tanh())?;
                    let loss = model.outwards.forward(&y)?.square()?.sum_all()?;
                    rt.reset_peak();
                    sharded.begin(0, BackwardPass::Last(None))?;
                    autograd::backward_with_hooks(&loss, &mut sharded)?;
                    sharded.end()?;
                    sharded.finish()?;
                    peaks.push(rt.memory().of(MemoryCategory::Communication).peak);
                    sharded.update(&Tensor::ones(rt, [], DType::F32)?)?;
                }
                Ok(peaks)
            });
            let padding = 5 * 256 * n;
            for peaks in peaks.unwrap() {
                assert!(peaks[1..].iter().all(|peak| *peak <= 3 * BLOCK + 2 * ROOT + padding), "{n}: {peaks:?}");
            }
        }
    }
}

/// Units in the order in which they are gathered.
type Gathers = Arc<Mutex<Vec<String>>>;

/// A world of one that notes what is gathered.
fn gathering(rt: &Cpu) -> (Comm<Cpu>, Gathers) {
    let gathers = Gathers::default();
    let units = gathers.clone();
    let comm = Between::new(Arc::new(NoOpCommunicator::new(rt)), move |inner, call| {
        if call.what().name() == "all_gather" {
            units.lock().unwrap().push(call.fingerprint().of.map_or(String::new(), |of| of.to_string()));
        }
        inner.start(call)
    });
    (Arc::new(comm), gathers)
}

fn take(gathers: &Gathers) -> Vec<String> {
    std::mem::take(&mut *gathers.lock().unwrap())
}

/// What a forward of four layers gathers after a backward pass, in a second step, and when it has computed each layer. `skip`: that backward pass did not
/// reach the first layer.
fn second_forward(skip: bool, ended: bool) -> Vec<String> {
    let rt = Cpu::with_threads(1);
    let (comm, gathers) = gathering(&rt);
    let model = layers(&rt, 4, DType::F32).unwrap();
    let adamw = ParamGroups::new(AdamWConfig::default());
    let options = options(ZeroStage::Parameters, UnitOf::layers());
    let mut sharded = Sharded::new(&comm, &model, adamw, options).unwrap();
    let x = Tensor::normal(&rt, [4, 128], DType::F32, 0.0, 1.0, 1).unwrap();
    let forward = |skip: bool| {
        let mut y = Var::new(x.clone());
        for (k, layer) in model.iter().enumerate() {
            y = layer.forward(&y).unwrap().tanh().unwrap();
            gathers.lock().unwrap().push(format!("layer {k}"));
            if skip && k == 0 {
                y = y.detach();
            }
        }
        y.square().unwrap().sum_all().unwrap()
    };
    let (mut second, passes) = (Vec::new(), [BackwardPass::Earlier, BackwardPass::Last(None)]);
    for _ in 0..2 {
        sharded.prepare(ActiveRanks::All).unwrap();
        for (k, pass) in passes.iter().enumerate() {
            take(&gathers);
            let loss = forward(skip && k == 0);
            second = take(&gathers);
            sharded.begin(0, *pass).unwrap();
            autograd::backward_with_hooks(&loss, &mut sharded).unwrap();
            if ended {
                sharded.end().unwrap();
            }
        }
        sharded.finish().unwrap();
        sharded.update(&Tensor::ones(&rt, [], DType::F32).unwrap()).unwrap();
    }
    second
}

#[test]
fn the_forward_after_a_sweep_prefetches_forwards() {
    // Every unit is prefetched before the layer before it is computed.
    let all = ["unit `0`", "unit `1`", "layer 0", "unit `2`", "layer 1", "unit `3`", "layer 2", "layer 3"];
    // A pipeline does not say when a backward pass has ended; a backward pass that left a unit out can only be told.
    for (skip, ended) in [(false, false), (false, true), (true, true)] {
        assert_eq!(second_forward(skip, ended), all, "left out: {skip}, told: {ended}");
    }
}

#[test]
fn what_an_evaluation_reads_is_not_the_order_of_the_next_step() {
    let rt = Cpu::with_threads(1);
    let (comm, gathers) = gathering(&rt);
    let model = layers(&rt, 4, DType::F32).unwrap();
    let options = options(ZeroStage::Parameters, UnitOf::layers());
    let mut trainer = sharded(&comm, &model, TrainingConfig::default(), options).unwrap();
    let x = Tensor::normal(&rt, [4, 128], DType::F32, 0.0, 1.0, 1).unwrap();
    let forward = |order: [usize; 4]| -> Result<Loss<Cpu>> {
        let y = order.iter().try_fold(Var::new(x.clone()), |y, &k| model[k].forward(&y)?.tanh())?;
        Ok(Loss::mean(y.square()?.sum_all()?))
    };
    for _ in 0..2 {
        trainer.step(|_| forward([0, 1, 2, 3])).unwrap();
        autograd::no_grad(|| forward([2, 0, 3, 1])).unwrap();
    }
    take(&gathers);
    let mut seen = Vec::new();
    for _ in 0..2 {
        trainer
            .step(|_| {
                let loss = forward([0, 1, 2, 3]);
                seen = take(&gathers);
                loss
            })
            .unwrap();
        take(&gathers);
        assert_eq!(seen, (0..4).map(|k| format!("unit `{k}`")).collect::<Vec<_>>());
    }
}
