//! Timelines of real steps: valid for the tools that read them, and complete.

#[path = "../../data/tests/common/mod.rs"]
mod common;

use std::{
    collections::BTreeMap,
    fs,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use comm::{Collectives, Communicator, Named, Ranks, ReduceOp, TracedCommunicator};
use common::Folder;
use data::{Array, InMemory, Loader, Rows};
use distributed::{
    pipeline,
    train::{Loss, TrainStep},
};
use nn::{Forward, Init, Linear};
use numcore::{
    DType, Result, Shape, Tensor, TensorMut,
    ops::{PointwiseOps, ReduceOps},
    trace::{Detail, Recording, RecordingOptions, SpanKind, span},
};
use runtime_cpu::Cpu;
use serde_json::Value;
use train::{
    Length, Trainer,
    recorder::{Profile, RunTimeline, UsageSampler},
};

/// A process has one recording at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Three ranks that train a linear layer for two steps, and one collective of a name.
fn recorded(detail: Detail) -> RunTimeline {
    let recording = Recording::start(RecordingOptions { detail, ..Default::default() }).unwrap();
    let program = |comm: comm::Comm<Cpu>| -> Result<()> {
        let comm = TracedCommunicator::over(&comm);
        let rt = Cpu::builder().threads(1).build();
        let model = Linear::new(&Init::new(&rt, 0), 4, 1)?;
        let optimizer = optim::Sgd::new(&model, optim::SgdConfig::default())?;
        let one = comm::NoOpCommunicator::new(&rt);
        let mut step = TrainStep::builder(&one, &model).optimizer(optimizer).build()?;
        let x = Tensor::ones(&rt, [2, 4], DType::F32)?;
        for _ in 0..2 {
            let loss = |_| Loss::sum(model.forward(&autograd::Var::new(x.clone()))?.sum_all()?, 2.0);
            let _ = step.step(loss)?;
        }
        let named = Named::over(&comm, "bucket <1>");
        let memory = TensorMut::zeros(named.runtime(), Shape::new(&[8])?, DType::F32)?;
        named.all_reduce(memory, ReduceOp::Sum)?.wait().map(drop)
    };
    Ranks::new(3).run(|_| Ok(Cpu::builder().threads(1).build()), program).unwrap();
    RunTimeline::of(&recording.stop(), 0)
}

fn events(json: &str) -> Vec<Value> {
    let file: Value = serde_json::from_str(json).expect("JSON");
    assert_eq!(file["displayTimeUnit"], "ms");
    file["traceEvents"].as_array().expect("a list").clone()
}

/// What the format asks of every event, and that spans of a thread are apart or within each other.
fn check(events: &[Value]) {
    let mut threads: BTreeMap<(u64, u64), Vec<(f64, f64)>> = BTreeMap::new();
    for event in events {
        let has =
            |keys: &[&str]| assert!(keys.iter().all(|key| !event[key].is_null()), "{event} lacks one of {keys:?}");
        has(&["name", "ph", "pid"]);
        match event["ph"].as_str().unwrap() {
            "M" => has(&["args"]),
            "X" => {
                has(&["cat", "ts", "dur", "tid"]);
                let (start, length) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
                let thread = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
                threads.entry(thread).or_default().push((start, start + length));
            }
            "C" => assert!(event["args"].as_object().unwrap().values().all(Value::is_number), "{event}"),
            "s" | "f" => has(&["id", "ts", "tid", "cat"]),
            other => panic!("events of phase {other} are not written"),
        }
    }
    for spans in threads.values() {
        for (i, a) in spans.iter().enumerate() {
            for b in &spans[i + 1..] {
                // A thousandth of a nanosecond, for sums of microseconds in binary.
                let (apart, within) = (b.0 + 1e-6 >= a.1, b.0 + 1e-6 >= a.0 && b.1 <= a.1 + 1e-6);
                assert!(apart || within, "{a:?} and {b:?} overlap");
            }
        }
    }
}

#[test]
fn real_steps_are_valid_trace_events() {
    let _alone = alone();
    let timeline = recorded(Detail::Operations);
    assert_eq!(timeline.ranks.iter().map(|r| r.rank).collect::<Vec<_>>(), [0, 1, 2]);
    let json = timeline.to_chrome_json();
    let events = events(&json);
    check(&events);
    let count = |test: &dyn Fn(&Value) -> bool| events.iter().filter(|event| test(event)).count();
    for phase in ["forward", "backward", "update"] {
        assert_eq!(count(&|e| e["name"] == phase && e["ph"] == "X"), 6, "{phase}: two steps on three ranks");
    }
    assert!(count(&|e| e["cat"] == "cpu_op" && e["name"] == "linear") >= 6);
    assert!(count(&|e| e["cat"] == "kernel" && e["name"] == "linear" && !e["args"]["stream"].is_null()) >= 6);
    let reduced = |e: &Value| e["name"] == "all_reduce of bucket <1>" && e["cat"] == "kernel";
    assert_eq!(count(&|e| reduced(e)), 3);
    let one = events.iter().find(|e| reduced(e)).unwrap();
    assert_eq!((&one["args"]["of"], one["args"]["bytes"].as_u64()), (&"bucket <1>".into(), Some(2 * 2 * 8 / 3 * 4)));
    let waits = |e: &Value| e["name"] == "all_reduce of bucket <1>" && e["cat"] == "user_annotation";
    assert_eq!(count(&|e| waits(e)), 3);
    assert!(count(&|e| e["ph"] == "C" && e["name"] == "memory" && !e["args"]["parameters"].is_null()) > 0);
    assert_eq!(count(&|e| e["ph"] == "M" && e["name"] == "process_name"), 3);
}

#[test]
fn a_file_of_one_rank_says_which() {
    let _alone = alone();
    let timeline = recorded(Detail::Steps);
    let file: Value = serde_json::from_str(&timeline.to_chrome_json_of(1, 3)).unwrap();
    let info = &file["distributedInfo"];
    assert_eq!((&info["rank"], &info["world_size"]), (&1.into(), &3.into()));
    let events = file["traceEvents"].as_array().unwrap();
    check(events);
    assert!(events.iter().all(|event| event["pid"] == 1));
    assert!(events.iter().all(|event| event["cat"] != "cpu_op"), "phases and collectives alone");
}

#[test]
fn overlapping_collectives_get_lanes() {
    let _alone = alone();
    let recording = Recording::start(RecordingOptions::default()).unwrap();
    let outer = span(SpanKind::Phase, "backward");
    let (a, b) = (numcore::trace::now(), numcore::trace::now());
    numcore::trace::ended(SpanKind::Collective, "all_reduce", Some("a"), a, 1);
    numcore::trace::ended(SpanKind::Collective, "all_reduce", Some("b"), b, 1);
    drop(outer);
    let timeline = RunTimeline::of(&recording.stop(), 7);
    let names: Vec<&str> = timeline.ranks[0].tracks.iter().map(|track| track.name.as_str()).collect();
    assert_eq!((timeline.ranks[0].rank, &names[1..]), (7, &["communication", "communication 2"][..]));
    let events = events(&timeline.to_chrome_json());
    check(&events);
    // An arrow from the backward pass to each.
    let arrows =
        |ph: &str| events.iter().filter(|e| e["ph"] == ph).map(|e| e["tid"].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!((arrows("s"), arrows("f")), (vec![0, 0], vec![1, 2]));
}

#[test]
fn data_that_is_waited_for_is_seen_with_its_makers() {
    let _alone = alone();
    let recording = Recording::start(RecordingOptions::default()).unwrap();
    numcore::trace::set_rank(5);
    let loader = Loader::new(InMemory::new((0..8).map(f64::from).collect::<Vec<_>>())).batch(2).workers(2);
    assert_eq!(loader.epoch(0).unwrap().count(), 4);
    let timeline = RunTimeline::of(&recording.stop(), 0);
    assert_eq!(
        timeline.ranks.iter().map(|r| r.rank).collect::<Vec<_>>(),
        [5],
        "workers work for the rank that made them"
    );
    let of =
        |name: &str| timeline.ranks[0].tracks.iter().flat_map(|t| &t.spans).filter(|span| &*span.name == name).count();
    assert_eq!((of("make batch"), of("wait for batch")), (4, 4));
    assert!(timeline.ranks[0].tracks.iter().any(|track| track.name == "loader-1"));
}

#[test]
fn memory_of_pools_is_summed_over_time() {
    let _alone = alone();
    let recording = Recording::start(RecordingOptions::default()).unwrap();
    let (one, two) = (Cpu::builder().threads(1).build(), Cpu::builder().threads(1).build());
    let zeros = |rt: &Cpu| Tensor::zeros(rt, [1024], DType::F32).unwrap();
    let (a, b) = (zeros(&one), zeros(&two));
    let both = (one.memory_of_activations(), two.memory_of_activations());
    drop(a);
    drop(b);
    let timeline = RunTimeline::of(&recording.stop(), 3);
    let points: Vec<u64> =
        timeline.counter(timeline.ranks[0].rank, "activations").unwrap().points.iter().map(|p| p.1).collect();
    assert_eq!(points, [both.0, both.0 + both.1, both.1, 0]);
}

trait MemoryOfActivations {
    fn memory_of_activations(&self) -> u64;
}

impl MemoryOfActivations for Cpu {
    fn memory_of_activations(&self) -> u64 {
        numcore::Runtime::memory(self).of(numcore::MemoryCategory::Activations).live as u64
    }
}

#[test]
fn pictures_escape_names_and_leave_out_what_nobody_sees() {
    let _alone = alone();
    let svg = recorded(Detail::Operations).to_svg();
    assert!(svg.contains("all_reduce of bucket &lt;1&gt;") && !svg.contains("<1>"));
    assert!(svg.contains("rank 2 · rank-2") && svg.contains("spans too narrow or too deep"));
    assert_eq!(svg.matches("<g>").count(), svg.matches("</g>").count());
    let nothing = RunTimeline::default();
    assert!(nothing.to_svg().ends_with("</svg>\n"));
    check(&events(&nothing.to_chrome_json()));
}

#[test]
fn a_pipelines_timeline_is_one_too() {
    let shape = pipeline::PipeShape { ranks: 2, stages_per_rank: 1, micro_batches: 4 };
    let schedule = pipeline::ScheduleKind::GPipe.generate(shape).unwrap().lower(pipeline::Lowering::default()).unwrap();
    let simulation = schedule.simulate(&pipeline::Costs::default(), pipeline::SendMode::Overlapped).unwrap();
    let simulated = pipeline::Timeline::from(&simulation);
    let timeline = RunTimeline::from(&simulated);
    assert_eq!((timeline.ranks.len(), timeline.ranks[1].tracks[0].name.as_str()), (2, "pipeline"));
    for (rank, events) in timeline.ranks.iter().zip(&simulated.ranks) {
        assert_eq!(rank.tracks.iter().map(|track| track.spans.len()).sum::<usize>(), events.len());
    }
    check(&events(&timeline.to_chrome_json()));
}

#[test]
fn windows_of_steps_become_files() {
    let _alone = alone();
    let folder = Folder::new("profile");
    let mut profile = Profile::in_folder(folder.path("run")).wait(2).active(1).repeat(2).rank(3, 4);
    for step in 0..20 {
        profile.step().unwrap();
        let recorded = numcore::trace::is_recorded(SpanKind::Phase);
        assert_eq!(recorded, step == 2 || step == 5, "step {step}");
        numcore::trace::set_rank(3);
        drop(span(SpanKind::Phase, "work"));
    }
    let mut names: Vec<String> =
        fs::read_dir(folder.path("run")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["trace.rank3.1.json", "trace.rank3.1.svg", "trace.rank3.2.json", "trace.rank3.2.svg"]);
    let json = fs::read_to_string(folder.path("run/trace.rank3.2.json")).unwrap();
    assert_eq!(events(&json).iter().filter(|e| e["name"] == "work").count(), 1);
    // No step before a window, and what cannot be written.
    let occupied = folder.file("occupied", "a file");
    // A window has a step at least.
    let mut profile = Profile::in_folder(&occupied).wait(0).active(0);
    profile.step().unwrap();
    let error = profile.step().unwrap_err().to_string();
    assert!(error.contains("occupied"), "{error}");
}

#[test]
fn a_trainer_records_windows_of_all_its_ranks() {
    let _alone = alone();
    // A rank names its file after itself.
    for only in [None, Some(0), Some(1)] {
        records_windows(&Folder::new("trainer"), only);
    }
}

/// Trains on two ranks, of which either records, or only one does.
fn records_windows(folder: &Folder, only: Option<usize>) {
    let program = |comm: comm::Comm<Cpu>| {
        let (rt, comm) = (comm.runtime().clone(), TracedCommunicator::over(&comm));
        let model = Linear::new(&Init::new(&rt, 0), 2, 1)?;
        let step = TrainStep::builder(&comm, &model).optimizer(optim::SgdConfig::default()).build()?;
        let rows = Rows::new(Array::new([16, 2], (0..32).map(|i| i as f32 / 100.0).collect())?)?;
        let loader = Loader::new(rows).batch(4).rank(comm.rank(), comm.size()).stack().on(&rt);
        let windows = u64::from(only.is_none_or(|only| only == comm.rank()));
        let profile = Profile::in_folder(folder.path("run")).wait(1).active(2).repeat(windows);
        let trainer = Trainer::new(&model, step, loader).until(Length::Steps(6)).with(profile);
        let report = trainer.run(|model, batch| {
            let error = model.forward(&autograd::Var::new(batch.data.clone()))?;
            Loss::sum(error.square()?.sum_all()?, batch.count as f64)
        })?;
        Ok(report.progress.step)
    };
    let steps = Ranks::new(2).run(|_| Ok(Cpu::builder().threads(1).build()), program).unwrap();
    assert_eq!(steps, [6, 6]);
    if let Some(rank) = only {
        assert!(folder.path("run").join(format!("trace.rank{rank}.1.svg")).is_file());
    }
    // One of the ranks recorded, for both.
    let files = ["trace.rank0.1.json", "trace.rank1.1.json"];
    for file in files.map(|file| fs::read_to_string(folder.path("run").join(file)).unwrap()) {
        let events = events(&file);
        check(&events);
        assert!(events.iter().any(|e| e["name"] == "backward"));
        assert!(events.iter().any(|e| e["name"].as_str().is_some_and(|name| name.contains("bucket"))), "{file}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_busy_process_is_seen() {
    let _alone = alone();
    let recording = Recording::start(RecordingOptions { detail: Detail::Steps, ..Default::default() }).unwrap();
    let sampler = UsageSampler::start(Duration::from_millis(20)).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    drop(sampler);
    let timeline = RunTimeline::of(&recording.stop(), 0);
    let ranks = timeline.ranks.iter().map(|r| r.rank);
    assert!(ranks.filter_map(|rank| timeline.counter(rank, "cpu %")).any(|counter| !counter.points.is_empty()));
}

#[test]
fn arithmetic_is_not_changed_by_a_recording() {
    let _alone = alone();
    let rt = Cpu::builder().threads(1).build();
    let compute = || {
        let x = Tensor::from_slice(&rt, [4], &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
        x.exp().unwrap().to_vec::<f32>().unwrap()
    };
    let before = compute();
    let recording = Recording::start(RecordingOptions::default()).unwrap();
    let within = compute();
    drop(recording);
    assert_eq!(before, within);
}
