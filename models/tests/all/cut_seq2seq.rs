//! Encoder–decoders whose layers are cut over ranks give the logits of one rank.

use distributed::{
    comm::{Comm, Communicator, Ranks},
    mesh::Mesh,
    plan::{Axis, ParallelPlan},
};
use models::{Pretrained, T5};
use nn::{Init, parallel::TensorPlan};
use numcore::{DType, Result, Tensor};
use runtime_cpu::Cpu;

use crate::common::*;

/// A plan of attention's projections into it and back, of the linear layers, and of biases by distance.
fn plan(into: &[&str]) -> TensorPlan {
    ["encoder", "decoder"].iter().fold(TensorPlan::new(), |plan, part| {
        let plan = ["attention", "cross"].iter().fold(plan, |plan, block| {
            let at = |linear: &str| format!("{part}.layers.*.{block}.{linear}");
            let plan = into.iter().fold(plan, |plan, linear| plan.column(at(linear)).optional());
            plan.row(at("o_proj")).optional()
        });
        let plan = plan.column(format!("{part}.layers.*.mlp.up_proj")).row(format!("{part}.layers.*.mlp.down_proj"));
        plan.column(format!("{part}.layers.*.mlp.gate_proj")).optional()
    })
}

fn logits(comm: &Comm<Cpu>, name: &str, plan: &TensorPlan) -> Result<Tensor<Cpu>> {
    let mesh = Mesh::new(comm, ParallelPlan::of([(Axis::Tensor, comm.size())])?)?;
    let init = Init::new(comm.runtime(), 0).dtype(DType::F64).lazily();
    let model = T5::from_pretrained(reference(name), &init)?;
    mesh.parallelize(&model, plan)?;
    let due = Reference::read(name);
    let memory = model.encode(&due.var("ids"), Some(&due.var("mask")))?;
    model.decoder()?.logits(&due.var("begun"), &memory, None)?.value()
}

fn all(ranks: usize, name: &str, plan: &TensorPlan) -> Result<Vec<Tensor<Cpu>>> {
    Ranks::new(ranks).run(|_| Ok(cpu()), |comm| logits(&comm, name, plan))
}

#[test]
fn t5_on_two_ranks_gives_the_logits_of_one() {
    let plan = plan(&["q_proj", "k_proj", "v_proj"]).row("encoder.relative").row("decoder.relative");
    for name in ["t5", "t5_gated"] {
        let one = all(1, name, &plan).unwrap().remove(0);
        for here in all(2, name, &plan).unwrap() {
            close(name, &here, &one, 1e-11);
        }
    }
}

#[test]
fn heads_that_do_not_fit_each_other_are_an_error() {
    let error = |plan: &TensorPlan| all(2, "t5", plan).map(drop).unwrap_err().to_string();
    let whole_keys = plan(&["q_proj", "v_proj"]);
    assert!(error(&whole_keys).contains("queries are cut by Column, keys by Replicated"), "{}", error(&whole_keys));
    let three = ["q_proj", "k_proj", "v_proj"];
    let whole_biases = error(&plan(&three));
    assert!(whole_biases.contains("2 heads have biases of distances here, and 1 have queries"), "{whole_biases}");
    let buckets = error(&plan(&three).column("encoder.relative"));
    assert!(buckets.contains("encoder.relative.weight"), "{buckets}");
}
