//! Processes joined by TCP that are killed, stopped and cut off: the run goes on, to the bit, and no process is left.
#![cfg(unix)]

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{self, Command, Stdio},
    thread,
    time::Instant,
};

use engine_process::Tcp;
use train::StepReplay;

use crate::{
    common::*,
    faults_joins::{AwaitedRendezvous, perhaps_lost},
    faults_plans::{Fault, FaultPlan, LENGTH, Link, SILENCE, Second},
    kills::{Lines, told},
    prelude::*,
};

const FOLDER: &str = "WEFTGRAD_TEST_FAULTS_FOLDER";
const SEED: &str = "WEFTGRAD_TEST_FAULTS_SEED";
/// How many seeds are tried, where that is asked for, and the first of them.
const SEEDS: &str = "WEFTGRAD_TEST_FAULTS_SEEDS";
const FIRST: &str = "WEFTGRAD_TEST_FAULTS_FIRST";
/// Set if newcomers join the run.
const JOINS: &str = "WEFTGRAD_TEST_FAULTS_JOINS";
/// Longer than any run here may take, on a busy machine too.
const LONG: Duration = Duration::from_secs(120);

/// The losses of a run, by step.
type Losses = BTreeMap<(String, u64), String>;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn plan() -> Option<(PathBuf, FaultPlan)> {
    let of = if number(JOINS) == Some(1) { FaultPlan::with_newcomers } else { FaultPlan::of };
    Some((std::env::var_os(FOLDER)?.into(), of(number(SEED)?)))
}

/// Not a test of its own: the launcher of a job, which the test below starts.
#[test]
fn launcher() {
    let Some((_, plan)) = plan() else { return };
    let job = launch::Job::new(std::env::current_exe().unwrap(), plan.ranks);
    let job = job.args(["--exact", "faults::rank", "--nocapture"]).max_restarts(1);
    // As many as the quorum of the run.
    let job = match (plan.joins, plan.is_elastic) {
        (true, _) => job.elastic(2, plan.ranks).max_restarts(4),
        (false, true) => job.min_ranks(plan.ranks / 2 + 1),
        (false, false) => job,
    };
    process::exit(job.run().unwrap().into());
}

/// Not a test of its own: a rank of the job.
#[test]
fn rank() {
    let (Some((folder, plan)), Some(rank)) = (plan(), number("RANK")) else { return };
    let start = number("TORCHELASTIC_RESTART_COUNT").unwrap();
    append(&folder.join("processes"), &process::id().to_string());
    let is_victim = start == 0 && rank == plan.victim as u64;
    let mut link = None;
    if is_victim && matches!(plan.fault, Fault::Cut | Fault::Mute) {
        let port = number("MASTER_PORT").unwrap() as u16;
        link = Some(Link::to(([127, 0, 0, 1], port).into()).unwrap());
    }
    let port = link.as_ref().map(|(_, port)| port.to_string());
    let variable = |name: &str| port.clone().filter(|_| name == "MASTER_PORT").or_else(|| std::env::var(name).ok());
    let tcp = Tcp::from_lookup(variable).unwrap().silence(SILENCE).join_timeout(LONG / 8);
    perhaps_lost(&plan, start);
    let processes = tcp.join().unwrap().timeout(LONG);
    let (link, rt) = (link.map(|(link, _)| link), Cpu::with_threads(1));
    let fault = RankFault { plan: is_victim.then_some(plan), link };
    let outcome: Result<StopReason> = if plan.is_elastic {
        let quorum = Quorum { majority: true, join_timeout: 2 * SILENCE, ..Quorum::default() };
        let processes = Arc::new(processes);
        let worlds = processes.rendezvous(rt, quorum).unwrap();
        let second = start == 0 && plan.second == Some(Second::Rank(rank as usize));
        let elastic = match plan.joins {
            true => Elastic::new(AwaitedRendezvous::new(worlds, plan, second)),
            false => Elastic::new(worlds),
        };
        // Newcomers are in the worlds of the first start.
        let start = if plan.joins { 0 } else { start };
        let outcome = elastic.run(|world| {
            let (comm, generation) = (world.comm()?, world.generation());
            fault.train(&folder, &plan, &comm, &format!("{start}.{generation}"), Some(world))
        });
        drop(processes);
        outcome
    } else {
        let name = format!("{start}.0");
        let outcome = processes.run(|_| Ok(rt), |comm| fault.train(&folder, &plan, &comm, &name, None));
        // The others may still read its last messages.
        drop(processes);
        outcome
    };
    match &outcome {
        Ok(reason) => println!("rank {rank} ends: {reason:?}"),
        Err(error) => println!("rank {rank} ends: {error}"),
    }
    process::exit(i32::from(outcome.is_err()));
}

/// Appends a line at once.
fn append(path: &Path, text: &str) {
    let mut file = fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
    file.write_all(format!("{text}\n").as_bytes()).unwrap();
}

fn trainer<'a>(plan: &FaultPlan, comm: &Comm<Cpu>, model: &'a Mlp<Cpu>) -> Result<Tested<'a>> {
    let step = match plan.how {
        0 => ddp(comm, model, 1)?,
        1 => zero(comm, model, ZeroStage::Optimizer, 1)?,
        _ => zero(comm, model, ZeroStage::Parameters, 1)?,
    };
    Ok(Trainer::new(model, step, loader(comm.runtime())).record_every(Interval::Steps(1)))
}

/// Says where a world has begun.
struct Begins(PathBuf);

impl<M, B> Callback<Cpu, M, B> for Begins {
    fn on(&mut self, event: &Event<'_, Cpu>, run: &mut Run<'_, Cpu, M, B>) -> Result<()> {
        if matches!(event, Event::Begin) {
            append(&self.0, &run.progress().step.to_string());
        }
        Ok(())
    }
}

/// What befalls this rank, if anything.
struct RankFault {
    plan: Option<FaultPlan>,
    link: Option<Link>,
}

impl RankFault {
    /// Trains in one world, whose losses and beginnings are in a folder of its name.
    fn train(
        &self,
        folder: &Path,
        plan: &FaultPlan,
        comm: &Comm<Cpu>,
        name: &str,
        world: Option<&mut ElasticWorld<Cpu>>,
    ) -> Result<StopReason> {
        autograd::manual_seed(7);
        let model = Mlp::new(comm.runtime(), 0.3)?;
        let own = folder.join("worlds").join(format!("{name}.{}", comm.size()));
        fs::create_dir_all(&own)?;
        let lines = fs::OpenOptions::new().append(true).create(true).open(own.join("losses"))?;
        let checkpoints = Checkpoints::in_folder(folder.join("checkpoints")).every(Interval::Steps(plan.save));
        let trainer = trainer(plan, comm, &model)?.until(Length::Steps(LENGTH)).with(checkpoints);
        let trainer = trainer.with(Begins(own.join("begun"))).sink(Lines(lines)).resume(Resume::IfThere);
        let trainer = trainer.hash_state(Interval::Steps(1));
        let (mut step, mut happening) = (0, None);
        let trainer = match world {
            Some(world) => trainer.elastic(world, Interval::Steps(plan.commit)),
            None => trainer,
        };
        let report = trainer.run(|model, batch| {
            sleep(Duration::from_millis(1));
            if let Some(fault) = self.plan.filter(|fault| fault.at == step) {
                let link = self.link.clone();
                happening = Some(thread::spawn(move || fault.happen(link.as_ref())));
            }
            step += 1;
            // No run ends before its fault.
            if step == LENGTH
                && let Some(happening) = happening.take()
            {
                happening.join().unwrap();
            }
            loss(model, batch)
        })?;
        Ok(report.reason)
    }
}

/// A world of a run: its losses, its ranks, and the step at which it began.
#[derive(Debug)]
struct World {
    name: String,
    ranks: usize,
    begun: u64,
    losses: Losses,
}

/// The worlds of a run, in their order.
fn worlds(folder: &Path) -> Vec<World> {
    let world = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().unwrap();
        let begun: Vec<u64> = fs::read_to_string(entry.path().join("begun"))
            .unwrap_or_default()
            .lines()
            .map(|step| step.parse().unwrap())
            .collect();
        // One that failed before it began has none.
        let first = *begun.first()?;
        assert!(begun.iter().all(|step| *step == first), "{name}: ranks began at {begun:?}");
        let ranks = name.rsplit('.').next().unwrap().parse().unwrap();
        Some(World { name, ranks, begun: first, losses: told(&entry.path()) })
    };
    let all = fs::read_dir(folder.join("worlds")).unwrap();
    let mut all: Vec<World> = all.filter_map(|entry| world(entry.unwrap())).collect();
    // As numbers: the tenth generation comes after the ninth.
    all.sort_by_key(|world| world.name.split('.').map(|part| part.parse::<u64>().unwrap()).collect::<Vec<_>>());
    all
}

/// The losses of threads in place of the processes of a world, undisturbed, until a step, after which they save.
fn undisturbed(plan: &FaultPlan, worlds: &[World], until: u64, into: &Path) -> Losses {
    let (world, before) = worlds.split_last().unwrap();
    fs::create_dir_all(into).unwrap();
    // Who trained up to the step at which this one began.
    let from = before.iter().rposition(|other| other.begun < world.begun).filter(|_| world.begun > 0);
    let from = from.map(|place| {
        let from = into.join("from");
        undisturbed(plan, &worlds[..=place], world.begun, &from);
        Resume::From(from.join("checkpoints"))
    });
    let lines = || Ok::<_, Error>(fs::OpenOptions::new().append(true).create(true).open(into.join("losses"))?);
    on_ranks(world.ranks, |comm| {
        autograd::manual_seed(7);
        let model = Mlp::new(comm.runtime(), 0.3)?;
        let trainer = trainer(plan, comm, &model)?.until(Length::Steps(until)).sink(Lines(lines()?));
        let trainer = trainer.with(Checkpoints::in_folder(into.join("checkpoints")).ignore_signals());
        trainer.resume(from.clone().unwrap_or(Resume::No)).run(loss)
    })
    .unwrap();
    told(into)
}

fn is_running(id: &str) -> bool {
    Command::new("kill").args(["-s", "0", id]).stderr(Stdio::null()).status().unwrap().success()
}

fn goes_on(seed: u64, joins: bool) {
    let plan = if joins { FaultPlan::with_newcomers(seed) } else { FaultPlan::of(seed) };
    let scratch = Scratch::new("faults");
    let folder = scratch.0.join("run");
    fs::create_dir_all(&folder).unwrap();
    let output = fs::File::create(folder.join("output")).unwrap();
    let mut launcher = Command::new(std::env::current_exe().unwrap());
    launcher.args(["--exact", "faults::launcher", "--nocapture"]).env(FOLDER, &folder).env(SEED, seed.to_string());
    launcher.env(JOINS, u8::from(joins).to_string());
    launcher.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output);
    let (mut launcher, begun) = (launcher.spawn().unwrap(), Instant::now());
    let said = || format!("seed {seed}, {plan:?}:\n{}", fs::read_to_string(folder.join("output")).unwrap());
    let status = loop {
        match launcher.try_wait().unwrap() {
            Some(status) => break status,
            None if begun.elapsed() > LONG => {
                launcher.kill().and_then(|()| launcher.wait()).unwrap();
                // Its ranks go on: nothing in them ends with it.
                let ids = fs::read_to_string(folder.join("processes")).unwrap_or_default();
                for id in ids.lines().filter(|id| is_running(id)) {
                    Command::new("kill").args(["-s", "KILL", id]).status().unwrap();
                }
                panic!("it never ended: {}", said());
            }
            None => sleep(Duration::from_millis(5)),
        }
    };
    assert!(status.success(), "{}", said());
    let ids = fs::read_to_string(folder.join("processes")).unwrap();
    assert_eq!(ids.lines().find(|id| is_running(id)), None, "it is left; {}", said());
    let worlds = worlds(&folder);
    let steps = |world: &World| world.losses.keys().map(|(_, step)| *step).collect::<Vec<_>>();
    for (k, world) in worlds.iter().enumerate() {
        let whole = undisturbed(&plan, &worlds[..=k], LENGTH, &scratch.0.join(format!("whole-{k}")));
        for (step, bits) in &world.losses {
            assert_eq!(Some(bits), whole.get(step), "{step:?} of world {}; {}", world.name, said());
        }
        assert!(steps(world).first().is_none_or(|first| *first == world.begun + 1), "{}", said());
    }
    let last = worlds.last().unwrap();
    assert_eq!(steps(last), (last.begun + 1..=LENGTH).collect::<Vec<_>>(), "{}", said());
    let all: std::collections::BTreeSet<u64> = worlds.iter().flat_map(steps).collect();
    assert_eq!(all.into_iter().collect::<Vec<_>>(), (1..=LENGTH).collect::<Vec<_>>(), "{}", said());
    assert_eq!(worlds.len() == 1, plan.is_harmless(), "{}", said());
    assert_eq!(Folder::new(folder.join("checkpoints")).latest().unwrap(), Some(LENGTH), "{}", said());
    assert!(!joins || last.ranks == plan.ranks, "{}", said());
    // All steps again, by threads, from the last checkpoint before a step and from scratch.
    let again = |step: u64| {
        let (elsewhere, fault) = (scratch.0.join("replay"), RankFault { plan: None, link: None });
        let train = |comm: &Comm<Cpu>, world: Option<&mut ElasticWorld<Cpu>>| {
            fault.train(&elsewhere, &plan, comm, "0.0", world)
        };
        let replay = StepReplay::of(folder.join("checkpoints"), step);
        let again = match plan.is_elastic {
            true => replay.run_elastic(cpu, |world| train(&world.comm()?, Some(world))),
            false => replay.run(cpu, |comm| train(&comm, None)),
        };
        let again = again.unwrap_or_else(|error| panic!("step {step}: {error}; {}", said()));
        let loss = again.ranks[0].loss.map(|loss| format!("{:016x}.", loss.to_bits()));
        let taken = worlds.iter().rev().find_map(|world| Some((world, world.losses.get(&("loss".into(), step))?)));
        let (world, bits) = taken.unwrap();
        assert_eq!((loss.as_ref(), again.ranks.len()), (Some(bits), world.ranks), "step {step}; {}", said());
    };
    [1, last.begun, last.begun + 1, LENGTH].into_iter().filter(|step| *step > 0).for_each(again);
    Folder::new(folder.join("checkpoints")).clear().unwrap();
    again(LENGTH);
    let names: Vec<String> = worlds.iter().map(|world| format!("{} from {}", world.name, world.begun)).collect();
    println!("seed {seed}, {plan:?}: {names:?}");
}

fn all_go_on(joins: bool) {
    if number("RANK").is_some() {
        return;
    }
    let first = number(FIRST).unwrap_or(0);
    (first..first + number(SEEDS).unwrap_or(3)).for_each(|seed| goes_on(seed, joins));
}

#[test]
fn whatever_happens_to_a_process_the_run_goes_on_to_the_bit() {
    all_go_on(false);
}

#[test]
fn newcomers_in_the_place_of_lost_processes_go_on_to_the_bit() {
    all_go_on(true);
}
