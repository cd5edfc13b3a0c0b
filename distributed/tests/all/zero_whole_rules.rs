//! Rules that need whole parameters, over shards: each parameter is in one shard.

use crate::prelude::*;

const RULES: [Rule; 3] = [Rule::Lamb, Rule::Adafactor, Rule::Muon];
const SHARDED: [ZeroStage; 3] = [ZeroStage::Optimizer, ZeroStage::Gradients, ZeroStage::Parameters];

/// A way of each rule with these axes and options.
fn same(axes: &[(Axis, usize)], zero: impl Fn(ZeroStage) -> ZeroOptions, adjust: impl Fn(Way) -> Way) {
    for (rule, stage) in RULES.into_iter().flat_map(|rule| SHARDED.map(|stage| (rule, stage))) {
        adjust(Way { examples: 16, rule, ..Way::gpt(2).zero(zero(stage)).over(axes) }).same();
    }
}

#[test]
fn every_stage_at_any_number_of_ranks_is_one_rank() {
    for n in WORLDS {
        for accumulation in [1, 2] {
            same(&[(Axis::Shard, n)], ZeroOptions::from, |way| Way { accumulation, ..way });
        }
    }
}

#[test]
fn replicas_pipelines_and_places_of_shards_are_one_rank() {
    use Axis::{Context, Data, Pipe, Shard};
    let frozen = |way| Way { frozen: &["blocks.0.fc1", "wte"], accumulation: 2, ..way };
    same(&[(Data, 2), (Shard, 3)], ZeroOptions::from, frozen);
    same(&[(Shard, 2), (Context, 2)], ZeroOptions::from, |way| way);
    let staged = |mut way: Way| {
        way.gpt.tied_head = true;
        way.staged(ScheduleKind::OneFOneB, 1).micros(2)
    };
    for n in [2, 3] {
        same(&[(Pipe, 2), (Shard, n)], ZeroOptions::from, |way| Way { examples: 12, ..staged(way) });
    }
    let once = |stage: ZeroStage| ZeroOptions {
        reduce_once: true,
        units: UnitOf::whole(),
        state: StatePlace::Host,
        ..stage.into()
    };
    same(&[(Shard, 3)], once, |way| Way { accumulation: 2, max_norm: None, ..way });
    let host = |stage: ZeroStage| ZeroOptions {
        state: StatePlace::Host,
        gradients: if stage.shards_gradients() { StatePlace::Host } else { StatePlace::Device },
        parameters: if stage.shards_parameters() { StatePlace::Host } else { StatePlace::Device },
        unused: Unused::Allow,
        whole_up_to: if stage.shards_parameters() { 100 } else { 0 },
        ..stage.into()
    };
    same(&[(Data, 2), (Shard, 2)], host, |way| Way { accumulation: 2, ..way });
}

/// Of each cut to each other one; what is saved is the same bytes.
#[test]
fn checkpoints_are_those_of_one_rank_and_pass_between_all_cuts() {
    for rule in RULES {
        let at = |n: usize, stage: ZeroStage| Way { rule, ..Way::gpt(2).zero(stage).over(&[(Axis::Shard, n)]) };
        let cuts = [at(1, ZeroStage::None), at(3, SHARDED[2]), at(2, SHARDED[0]), at(5, SHARDED[1]), at(1, SHARDED[2])];
        let one = Scratch::new("whole-rules");
        cuts[0].go_on(None, 0..2, Some(&one.folder()));
        let want = cuts[0].go_on(Some(&one.folder()), 2..4, None);
        let mut from = one.folder();
        let mut kept = Vec::new();
        for way in &cuts {
            let again = Scratch::new("whole-rules");
            way.go_on(Some(&from), 0..0, Some(&again.folder()));
            assert!(contents(&again.folder()) == contents(&one.folder()), "{way:?}: saved otherwise");
            let off = distance(&way.go_on(Some(&again.folder()), 2..4, None), &want);
            assert!(off <= CLOSE, "{way:?}: {off:e}");
            from = again.folder();
            kept.push(again);
        }
    }
}

/// Before step `k`: the second layer is trained from the third step on, and the first no longer.
pub fn thaw(model: &Mlp<Cpu>, k: usize) {
    if k == 2 {
        model.freeze_where(nn::under("a"));
        model.unfreeze_where(nn::under("b"));
    }
}

fn thawing(n: usize, stage: ZeroStage, dtype: DType) -> Trace {
    everywhere(n, |comm| {
        let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(dtype))?;
        model.freeze_where(nn::under("b"));
        let mut step = TrainStep::builder(&comm, &model).optimizer(muon()).zero(stage).build()?;
        let mut trace = Trace::default();
        for k in 0..STEPS {
            thaw(&model, k);
            step.step(|_| model.loss(comm.runtime(), k, &own(&comm)))?;
            let _scope = step.gather_full_params()?;
            trace.weights.push(weights(&model)?);
        }
        Ok(trace)
    })
}

#[test]
fn what_is_unfrozen_has_a_shard_and_master_copies() {
    let [one, half] = [DType::F64, DType::BF16].map(|dtype| thawing(1, ZeroStage::None, dtype));
    for stage in SHARDED {
        for n in [2, 3, 8] {
            let off = difference(&thawing(n, stage, DType::F64), &one);
            assert!(off <= CLOSE, "{stage:?} on {n}: {off:e}");
        }
        assert!(thawing(1, stage, DType::BF16).weights == half.weights, "{stage:?}");
    }
}

#[test]
fn parameters_that_a_rule_cannot_update_are_refused_on_every_rank() {
    let built = |frozen: bool| {
        Ranks::new(3).outcomes(cpu, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            model.freeze_where(|name| frozen && name.ends_with("bias"));
            let builder = TrainStep::builder(&comm, &model).optimizer(MuonConfig::default());
            let mut step = builder.zero(ZeroStage::Parameters).build()?;
            model.unfreeze_where(|_| true);
            step.step(|_| model.loss(comm.runtime(), 0, &own(&comm))).map(drop)
        })
    };
    refused(built(false).unwrap(), &["Muon", "`a.bias` has shape", "only matrices"]);
    refused(built(true).unwrap(), &["Muon", ".bias` has shape", "only matrices"]);
}

/// Each rank has state of its own parameters alone, and as many of them as the others wherever units allow it.
#[test]
fn state_is_shared_out_over_units() {
    for (n, units) in [(2, UnitOf::layers()), (3, UnitOf::layers()), (3, UnitOf::whole())] {
        let bytes = Ranks::new(n).run(cpu, |comm| {
            let init = Init::new(comm.runtime(), 0);
            let layer = |_| Linear::new(&init, 64, 64).map(Linear::without_bias);
            let model = (0..6).map(layer).collect::<Result<Vec<_>>>()?;
            let options = ZeroOptions { units: units.clone(), ..ZeroStage::Parameters.into() };
            let _step = TrainStep::builder(&comm, &model).optimizer(LambConfig::default()).zero(options).build()?;
            let live = |category| comm.runtime().memory().of(category).live;
            Ok([live(MemoryCategory::Optimizer), live(MemoryCategory::Parameters)])
        });
        let own = 6 / n * 64 * 64 * 4;
        assert_eq!(bytes.unwrap(), vec![[2 * own, own]; n]);
    }
}
