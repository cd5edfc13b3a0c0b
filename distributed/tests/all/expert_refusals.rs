//! Refusals of experts over ranks, and their words.

use crate::{
    expert_decisions::{loss, on, refused},
    prelude::*,
};

#[test]
fn both_tensors_of_experts_are_shared_out_or_none() {
    for named in ["gate_up_proj", "down_proj"] {
        let why = refused(|mesh| {
            let case = Way::mixture(4);
            let model = case.whole_mixture(&Init::new(mesh.world().runtime(), 7).dtype(DType::F64))?;
            mesh.parallelize(&model, &TensorPlan::new().experts(format!("blocks.*.mlp.experts.{named}")))?;
            loss(&case, &model, mesh.world().runtime(), 0, &[0]).map(drop)
        });
        assert!(why.contains("name both in the plan"), "{why}");
    }
}

#[test]
fn the_expert_axis_makes_no_groups_with_others() {
    let outcome = on(4, 2, |mesh| {
        assert_eq!(mesh.group(&[Axis::Expert])?.size(), 2);
        Ok(mesh.group(&[Axis::Data, Axis::Expert]).map(drop).unwrap_err().to_string())
    });
    assert!(outcome.unwrap().iter().all(|why| why.contains("makes no groups with others")));
}

#[test]
fn words_of_refusals_name_the_expert_axis() {
    let case = Way::mixture(4);
    let other = refused(|mesh| {
        let model = case.mixture_on(mesh)?;
        let wider = ParallelPlan::of([(Axis::Data, 4), (Axis::Expert, 4)])?;
        TrainStep::builder(&Mesh::new(mesh.world(), wider)?, &model).optimizer(adamw()).experts().build().map(drop)
    });
    assert!(other.contains("over 2 ranks, and the mesh has 4 along expert"), "{other}");
}

#[test]
fn a_step_must_be_told_of_experts_and_a_model_have_them() {
    let case = Way::mixture(4);
    let not_reported = |zero: bool| {
        refused(|mesh| {
            let model = case.mixture_on(mesh)?;
            let builder = TrainStep::builder(mesh, &model).optimizer(adamw());
            if zero { builder.zero(ZeroStage::Optimizer).build().map(drop) } else { builder.build().map(drop) }
        })
    };
    for why in [not_reported(false), not_reported(true)] {
        assert!(why.contains("blocks.0.mlp.experts") && why.contains("call `experts()`"), "{why}");
    }
    let whole = refused(|mesh| {
        let model = case.whole_mixture(&Init::new(mesh.world().runtime(), 7))?;
        TrainStep::builder(mesh, &model).optimizer(adamw()).experts().build().map(drop)
    });
    assert!(whole.contains("2 ranks along expert") && whole.contains("Mesh::parallelize"), "{whole}");
}

#[test]
fn what_does_not_know_of_experts_is_refused() {
    let case = Way::mixture(4);
    let canonical = refused(|mesh| {
        let model = case.mixture_on(mesh)?;
        let options = BucketOptions { canonical: true, ..Default::default() };
        TrainStep::builder(mesh, &model).optimizer(adamw()).buckets(options).experts().build().map(drop)
    });
    assert!(canonical.contains("leave `canonical` out"), "{canonical}");
    let frozen = refused(|mesh| {
        let model = case.mixture_on(mesh)?;
        model.blocks()[1].mlp.experts.down_proj.set_requires_grad(mesh.world().rank() != 1);
        TrainStep::builder(mesh, &model).optimizer(adamw()).experts().build().map(drop)
    });
    assert!(frozen.contains("blocks.1.mlp.experts.down_proj") && frozen.contains("frozen"), "{frozen}");
}

#[test]
fn experts_that_cannot_be_shared_out_are_refused_with_the_numbers() {
    let layer = |experts: usize, plan: TensorPlan| {
        refused(|mesh| {
            let config = MoeConfig { shared_hidden: 3, ..MoeConfig::new(4, 4, experts, 1) };
            let layer = MixtureOfExperts::new(&Init::new(mesh.world().runtime(), 1), config)?;
            mesh.parallelize(&layer, &plan)
        })
    };
    let uneven = layer(5, TensorPlan::new().experts("experts"));
    assert!(
        uneven.contains("experts.gate_up_proj") && uneven.contains("5 experts cannot be shared out among 2"),
        "{uneven}"
    );
    let linear = layer(4, TensorPlan::new().experts("shared_experts.up_proj"));
    assert!(linear.contains("only tensors of experts"), "{linear}");
    let unknown = layer(4, TensorPlan::new().experts("mlp.experts"));
    assert!(unknown.contains("`mlp.experts` names no parameter"), "{unknown}");
    let columns = on(2, 1, |mesh| {
        let mesh = Mesh::new(mesh.world(), ParallelPlan::of([(Axis::Tensor, 2)])?)?;
        let layer = MixtureOfExperts::new(&Init::new(mesh.world().runtime(), 1), MoeConfig::new(4, 4, 4, 1))?;
        mesh.parallelize(&layer, &TensorPlan::new().column("experts"))
    });
    let columns = columns.unwrap_err().to_string();
    assert!(columns.contains("shared out by `experts`, or not at all"), "{columns}");
}

#[test]
fn stages_say_what_they_lack() {
    let axes = [(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Expert, 2)];
    let way = Way::mixture(4).staged(ScheduleKind::OneFOneB, 1).over(&axes);
    let unasked = way.ranks(|mesh| {
        let (model, _) = way.stages_on(mesh)?;
        TrainStep::builder(mesh, model).optimizer(adamw()).build().map(drop)
    });
    let unasked = unasked.unwrap_err().to_string();
    assert!(unasked.contains("mlp.experts") && unasked.contains("call `experts()`"), "{unasked}");
    let whole = way.ranks(|mesh| {
        let stages = way.whole_mixture(&Init::new(mesh.world().runtime(), 7))?.split(2);
        let loss = stages[1].loss();
        let model = PipelineModel::on(mesh.axis(Axis::Pipe).rank(), way.checked(2).unwrap(), stages).loss(loss);
        let model = model.parallelize(mesh, &TensorPlan::new().vocabulary("wte"))?;
        TrainStep::builder(mesh, model).optimizer(adamw()).experts().build().map(drop)
    });
    let none = whole.unwrap_err().to_string();
    assert!(none.contains("2 ranks along expert") && none.contains("PipelineModel::parallelize"), "{none}");
}
