//! Plans that do not fit: what is refused, and that the errors say why.

use crate::prelude::*;

/// The error of cutting a GPT over ranks, which every rank reports.
fn refused(t: usize, config: GptConfig, plan: TensorPlan) -> String {
    let outcomes = Ranks::new(t).outcomes(cpu, |comm| {
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, t)])?)?;
        mesh.parallelize(&Gpt::new(&Init::new(comm.runtime(), 0), config)?, &plan)
    });
    outcomes.unwrap().into_iter().map(|outcome| outcome.unwrap_err().to_string()).next().unwrap()
}

#[test]
fn plans_that_do_not_fit_are_refused_with_names_and_numbers() {
    let (plan, small) = (Gpt::<Cpu>::tensor_plan, GptConfig { layers: 1, ..Default::default() });
    let heads = refused(4, small, plan());
    assert!(
        heads.contains("blocks.0.qkv.weight") && heads.contains("6 rows or heads") && heads.contains("4 ranks"),
        "{heads}"
    );
    let nothing = refused(2, small, plan().column("blocks.*.fc3"));
    assert!(nothing.contains("`blocks.*.fc3` names no parameter"), "{nothing}");
    let norm = refused(2, small, TensorPlan::new().column("blocks.*.ln1"));
    assert!(norm.contains("blocks.0.ln1.weight") && norm.contains("cannot be cut"), "{norm}");
    let both = refused(2, small, plan().row("blocks.0.fc1"));
    assert!(both.contains("blocks.0.fc1.weight") && both.contains("which differ"), "{both}");
    let table = refused(2, small, plan().without("wte").column("wte"));
    assert!(table.contains("wte.weight") && table.contains("along its vocabulary"), "{table}");
    // A loss over a part of the classes, and a table that is read by position.
    let head = refused(2, small, plan().without("head").column("head"));
    assert!(head.contains("head.weight") && head.contains("along its vocabulary"), "{head}");
    let positions = refused(2, small, plan().vocabulary("wpe"));
    assert!(positions.contains("wpe.weight") && positions.contains("does not allow"), "{positions}");
    let removed = refused(2, small, plan().without("blocks.*.fc3"));
    assert!(removed.contains("no entry for `blocks.*.fc3`"), "{removed}");
}

#[test]
fn where_the_sequence_is_cut_every_layer_needs_a_line_that_fits() {
    let small = GptConfig { layers: 1, ..Default::default() };
    let plan = || Gpt::<Cpu>::tensor_plan().sequence_parallel(true);
    for (plan, parameter, why) in [
        (plan().without("blocks.*.fc1").without("blocks.*.fc2"), "blocks.0.fc1.weight", "by no entry"),
        (plan().without("blocks.*.ln1"), "blocks.0.ln1.weight", "by no entry"),
        (plan().without("lnf").replicated("lnf"), "lnf.weight", "by `replicated`"),
        // A parameter is named, and not its layer's bias.
        (plan().without("blocks.*.proj").row("blocks.*.proj.weight"), "blocks.0.proj.bias", "by no entry"),
        (plan().without("blocks.*.qkv").sequence("blocks.*.qkv"), "blocks.0.qkv.weight", "attention heads"),
        (plan().sequence("wpe"), "wpe.weight", "in no region"),
    ] {
        let error = refused(2, small, plan);
        assert!(error.contains(parameter) && error.contains(why), "{parameter} {why}: {error}");
    }
    let bare = TensorPlan::new().column("blocks.*.fc1").row("blocks.*.fc2").sequence("lnf").sequence_parallel(true);
    assert!(refused(2, small, bare).contains("does not cut sequences"));
    assert!(refused(2, small, plan().sequence_region("block.*")).contains("`block.*` names no parameter"));
}

#[test]
fn sequences_that_cannot_be_shared_out_are_refused() {
    let outcome = Ranks::new(2).run(cpu, |comm| {
        let case = Way { sequence: true, ..Way::gpt(2) };
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, 2)])?)?;
        let (tokens, _) = case.batch(comm.runtime(), 0, &[0])?;
        case.gpt_on(&mesh)?.forward(&tokens.narrow(1, 0, 3)?).map(drop)
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("3 tokens") && error.contains("pad them to 4"), "{error}");
}

#[test]
fn queries_keys_and_values_are_cut_alike() {
    let config = GroupedQueryConfig {
        width: 6,
        heads: 4,
        kv_heads: 2,
        head_dim: 4,
        fused: false,
        bias: false,
        output_bias: false,
        head_norm: Some(nn::HeadNorm::each(1e-6)),
        window: None,
        scores: Default::default(),
    };
    let refused = |plan: TensorPlan| {
        let outcome = Ranks::new(2).run(cpu, |comm| {
            let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, 2)])?)?;
            let attention = GroupedQueryAttention::new(&Init::new(comm.runtime(), 5).dtype(DType::F64), config)?;
            mesh.parallelize(&attention, &plan)?;
            let x = Var::new(Tensor::normal(comm.runtime(), [2, 5, 6], DType::F64, 0.0, 1.0, 3)?);
            attention.project(&x, None).map(drop)
        });
        outcome.unwrap_err().to_string()
    };
    let norms = |plan: TensorPlan| plan.partial_gradient("q_norm").partial_gradient("k_norm");
    let whole = refused(norms(TensorPlan::new().column("q_proj").row("o_proj")));
    assert!(whole.contains("keys by Replicated"), "{whole}");
    let cut = || TensorPlan::new().column("q_proj").column("k_proj").column("v_proj").row("o_proj");
    let unsummed = refused(cut().partial_gradient("q_norm"));
    assert!(unsummed.contains("`k_norm`") && unsummed.contains("name it by `partial_gradient`"), "{unsummed}");
    let summed = refused(norms(TensorPlan::new()));
    assert!(summed.contains("`q_norm`") && summed.contains("remove its line"), "{summed}");
}

#[test]
fn plans_differ_on_no_two_ranks() {
    let outcome = Ranks::new(2).run(cpu, |comm| {
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, 2)])?)?;
        let model = Gpt::new(&Init::new(comm.runtime(), 0), GptConfig { layers: 1, ..Default::default() })?;
        mesh.parallelize(&model, &Gpt::<Cpu>::tensor_plan().sequence_parallel(comm.rank() == 1))
    });
    assert!(outcome.unwrap_err().to_string().contains("tensor-parallel plan of rank 0 differs from that of rank 1"));
}

#[test]
fn a_step_wants_the_model_cut_over_its_own_mesh() {
    let build = |cut: bool, axis: Axis| {
        let outcome = Ranks::new(2).run(cpu, |comm| {
            let model = Gpt::new(&Init::new(comm.runtime(), 0), GptConfig { layers: 1, ..Default::default() })?;
            if cut {
                Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, 2)])?)?
                    .parallelize(&model, &Gpt::<Cpu>::tensor_plan())?;
            }
            let mesh = Mesh::new(&comm, ParallelPlan::of([(axis, 2)])?)?;
            TrainStep::builder(&mesh, &model).optimizer(SgdConfig::default()).build().map(drop)
        });
        outcome.unwrap_err().to_string()
    };
    assert!(build(false, Axis::Tensor).contains("is cut over 1 ranks, and the mesh has 2 along tensor"));
    assert!(build(true, Axis::Data).contains("is cut over 2 ranks, and the mesh has 1 along tensor"));
    assert!(build(false, Axis::Context).contains("are not cut, and the mesh has 2 ranks along context"));
}
