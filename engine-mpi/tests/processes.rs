//! What is done to processes from outside: killed, stopped, failing, panicking. This program starts `mpirun`, which starts it again as ranks.
#![cfg(feature = "open-mpi")]
#![allow(missing_docs)]

#[path = "support/saves.rs"]
mod saves;

use std::{
    env, fs,
    process::{Command, ExitCode, Output},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use adaptive::elastic::{Elastic, ElasticWorld};
use engine_mpi::engine_process::{
    Processes,
    comm::{Collectives, Comm, Communicator, Quorum, Ranks, ReduceOp},
};
use nn::Forward;
use numcore::{
    DType, Error, ErrorKind, Result, Tensor, TensorMut,
    ops::{PointwiseOps, ReduceOps},
};
use real_distributed::{
    checkpoint::Folder,
    train::{CheckpointNotes, Loss, TrainStep},
    zero::ZeroStage,
};
use runtime_cpu::Cpu;
use saves::{a_job_killed_while_it_saves_resumes_at_another_size, killed_later, train};

/// What ranks are told to do, in their environment.
const ROLE: &str = "WEFTGRAD_TEST_ROLE";
const SEED: &str = "WEFTGRAD_TEST_SEED";
const FOLDER: &str = "WEFTGRAD_TEST_FOLDER";
const DEFAULT_SEED: usize = 7;
/// The launcher's argument with which survivors go on.
const TOLERANT: &[&str] = &["--with-ft", "ulfm"];
/// The rank that it happens to.
const LOST: usize = 1;
/// The one that is lost soon after it.
const SECOND: usize = 2;
const TIMEOUT: Duration = Duration::from_secs(2);
/// The time after which `mpirun` has hung: it is told to end after a minute, and killed some seconds later.
const LAUNCHER_HANGS: Duration = Duration::from_secs(64);

/// Tests that run at once: they wait longer than they compute.
const AT_ONCE: usize = 3;

/// Tests with their names.
macro_rules! tests {
    ($($name:ident),* $(,)?) => { [$((stringify!($name), $name as fn())),*] };
}

fn main() -> ExitCode {
    match env::var(ROLE) {
        Ok(role) => rank(&role),
        Err(_) => {
            let only = env::args().nth(1).unwrap_or_default();
            let all = tests![
                an_error_is_told_and_the_job_fails,
                a_panic_is_told_and_the_job_fails,
                survivors_of_a_killed_rank_go_on,
                survivors_of_a_rank_killed_while_data_moves_go_on,
                a_job_killed_while_it_saves_resumes_at_another_size,
                an_elastic_run_goes_on_without_a_killed_rank,
                an_elastic_run_goes_on_without_a_rank_that_failed,
                an_elastic_run_goes_on_without_two_ranks,
                an_elastic_run_goes_on_without_a_rank_killed_before_it_commits,
                an_elastic_run_leaves_behind_a_rank_that_wakes,
                an_elastic_run_ends_with_a_rank_that_hangs,
                without_fault_tolerance_no_run_is_elastic,
                without_fault_tolerance_the_job_ends,
                a_stopped_rank_is_named,
                a_program_without_a_launcher_is_a_world_of_one,
            ];
            let asked = all.into_iter().filter(|(name, _)| name.contains(&only) || only.starts_with('-'));
            let asked = Mutex::new(asked.collect::<Vec<_>>().into_iter());
            let next = || asked.lock().expect("held for one step").next();
            let tests = || {
                while let Some((name, test)) = next() {
                    test();
                    println!("test {name} ... ok");
                }
            };
            thread::scope(|scope| (0..AT_ONCE).for_each(|_| drop(scope.spawn(tests))));
            ExitCode::SUCCESS
        }
    }
}

/// The program of a rank.
fn rank(role: &str) -> ExitCode {
    let mpi = engine_mpi::init().expect("MPI is there").timeout(TIMEOUT);
    // Many messages a call, so that one is hit while it moves.
    let mpi = if role == "survive-moving" { mpi.chunk(1 << 12) } else { mpi };
    if role.starts_with("elastic") {
        return elastic(mpi, role);
    }
    let outcome = mpi.run(
        |_| Ok(Cpu::with_threads(1)),
        |comm| match role {
            "error" => {
                let ends = || Err(Error::argument("loader", "the file ends here"));
                steps(&comm, |step| if step == 3 { ends() } else { Ok(()) })
            }
            "panic" => steps(&comm, |step| if step == 3 { panic!("no more data") } else { Ok(()) }),
            "one" => steps(&comm, |_| Ok(())),
            "survive-moving" => {
                killed_later(&comm);
                (0..200).try_for_each(|_| sum(&comm, 1 << 20))
            }
            "save" => {
                killed_later(&comm);
                train(&comm, 500)
            }
            "resume" => train(&comm, 3),
            "stop" => steps(&comm, |step| if step == 5 { signal("STOP") } else { Ok(()) }),
            // At some step, of seconds' worth of them.
            _ => steps(&comm, |step| if step == seed() { signal("KILL") } else { Ok(()) }),
        },
    );
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if role.starts_with("survive") => go_on(&mpi, &error),
        Err(error) => {
            println!("rank {} ends: {error}", mpi.rank());
            ExitCode::FAILURE
        }
    }
}

fn seed() -> usize {
    env::var(SEED).ok().and_then(|seed| seed.parse().ok()).unwrap_or(DEFAULT_SEED)
}

/// Sums over all ranks, with what befalls one rank before a step.
fn steps(comm: &Comm<Cpu>, befalls: impl Fn(usize) -> Result<()>) -> Result<()> {
    for step in 0..60 {
        if comm.rank() == LOST % comm.size() {
            befalls(step)?;
        }
        sum(comm, 3000 * (1 + step % 40))?;
    }
    Ok(())
}

fn sum(comm: &Comm<Cpu>, numel: usize) -> Result<()> {
    let x = TensorMut::zeros(comm.runtime(), [numel].into(), DType::F32)?;
    comm.all_reduce(x, ReduceOp::Sum)?.wait().map(|_| ())
}

fn signal(name: &str) -> Result<()> {
    let own = std::process::id().to_string();
    println!("{name} at {}", micros());
    Command::new("kill").args([&format!("-{name}"), &own]).status().expect("kill runs");
    std::thread::sleep(Duration::from_secs(1));
    Ok(())
}

/// The time of day, which all processes of a machine share.
fn micros() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros())
}

/// A survivor makes a world of those that are left, and works in it.
fn go_on(mpi: &Processes, error: &Error) -> ExitCode {
    println!("error at {}", micros());
    let named = matches!(error.kind(), ErrorKind::Peer { peer: LOST, .. });
    let rest = mpi.recover(&Cpu::with_threads(1)).and_then(|rest| {
        let own = rest.exchange(&[mpi.rank() as u8])?.concat();
        sum(&rest, 100_000)?;
        Ok((rest.members().to_vec(), own))
    });
    println!("rank {} goes on: named {named}, {rest:?}", mpi.rank());
    ExitCode::SUCCESS
}

/// A rank of an elastic run, of which one is lost after some steps, or two.
fn elastic(mpi: Processes, role: &str) -> ExitCode {
    let (mpi, rt) = (Arc::new(mpi), Cpu::with_threads(1));
    let join_timeout = if role == "elastic-hang" { TIMEOUT } else { 10 * TIMEOUT };
    let outcome = mpi.rendezvous(rt, Quorum { join_timeout, ..Quorum::default() }).and_then(|rendezvous| {
        Elastic::new(rendezvous).copies(2).run(|world| {
            let outcome = elastic_world(world, role);
            if (role, mpi.rank()) == ("elastic-two", SECOND) {
                // The second one dies while the others meet.
                std::thread::spawn(|| {
                    std::thread::sleep(Duration::from_micros(400 * (seed() as u64 % 53)));
                    signal("KILL")
                });
            }
            outcome
        })
    });
    match outcome {
        Ok((size, begun, weights)) => println!("rank {} of {size} from step {begun}: {weights:?}", mpi.rank()),
        Err(error) => println!("rank {} ends: {error}\nended at {}", mpi.rank(), micros()),
    }
    ExitCode::SUCCESS
}

/// The program of an elastic run's rank: the size of the world, the step at which it began, and the weights.
fn elastic_world(world: &mut ElasticWorld<Cpu>, role: &str) -> Result<(usize, u64, Vec<u32>)> {
    let comm = world.comm()?;
    let is_first = world.generation() == 0;
    if (role, is_first, comm.world_rank()) == ("elastic-two", false, SECOND) {
        std::thread::sleep(Duration::from_secs(5));
    }
    let is_lost = |k: u64| (is_first, comm.world_rank(), k) == (true, LOST, 1 + seed() as u64 % (ELASTIC_STEPS - 1));
    if role == "elastic-early" && is_first && comm.world_rank() == LOST {
        signal("KILL")?;
    }
    let (model, mut step) = sharded(&comm)?;
    let begun = world.restore(&mut step)?.map_or(0, |restored| restored.step);
    world.commit(begun, &step, &CheckpointNotes::new())?;
    for k in begun..ELASTIC_STEPS {
        match role {
            "elastic-error" if is_lost(k) => return Err(Error::argument("loader", "the file ends here")),
            "elastic-wakes" if is_lost(k) => {
                wakes_after(2 * TIMEOUT);
                signal("STOP")?;
            }
            "elastic-hang" if is_lost(k) => signal("STOP")?,
            _ if is_lost(k) => signal("KILL")?,
            _ => {}
        }
        sharded_step(&comm, &model, &mut step, k)?;
        if k % 3 == 2 {
            world.commit(k + 1, &step, &CheckpointNotes::new())?;
        }
    }
    Ok((comm.size(), begun, weights(&step, &model)?))
}

/// This process goes on after that time if it was stopped.
fn wakes_after(time: Duration) {
    let line = format!("(sleep {}; kill -CONT {}) > /dev/null 2>&1 &", time.as_secs(), std::process::id());
    Command::new("sh").args(["-c", &line]).status().expect("a shell runs");
}

const ELASTIC_STEPS: u64 = 12;

/// A model whose parameters are sharded over the ranks.
fn sharded(comm: &Comm<Cpu>) -> Result<(nn::Linear<Cpu>, TrainStep<Cpu>)> {
    let model = nn::Linear::new(&nn::Init::new(comm.runtime(), 3), 5, 7)?;
    let step = TrainStep::builder(comm, &model).optimizer(optim::AdamWConfig::default()).zero(ZeroStage::Parameters);
    let step = step.build()?;
    Ok((model, step))
}

fn sharded_step(comm: &Comm<Cpu>, model: &nn::Linear<Cpu>, step: &mut TrainStep<Cpu>, k: u64) -> Result<()> {
    let seed = 100 * k + comm.rank() as u64;
    let x = autograd::Var::new(Tensor::uniform(comm.runtime(), [3, 5], DType::F32, -1.0, 1.0, seed)?);
    step.step(|_| Ok(Loss::mean(model.forward(&x)?.square()?.mean_all()?))).map(drop)
}

fn weights(step: &TrainStep<Cpu>, model: &nn::Linear<Cpu>) -> Result<Vec<u32>> {
    let _whole = step.gather_full_params()?;
    Ok(model.weight.value()?.to_vec::<f32>()?.into_iter().map(f32::to_bits).collect())
}

fn an_elastic_run_goes_on_without_a_killed_rank() {
    with_seeds(|seed| elastic_run_goes_on("elastic", seed, &[0, 2, 3]));
}

fn an_elastic_run_goes_on_without_a_rank_that_failed() {
    with_seeds(|seed| elastic_run_goes_on("elastic-error", seed, &[0, 2, 3]));
}

fn an_elastic_run_goes_on_without_two_ranks() {
    with_seeds(|seed| elastic_run_goes_on("elastic-two", seed, &[0, 3]));
}

fn an_elastic_run_leaves_behind_a_rank_that_wakes() {
    elastic_run_goes_on("elastic-wakes", DEFAULT_SEED, &[0, 2, 3]);
}

fn an_elastic_run_goes_on_without_a_rank_killed_before_it_commits() {
    elastic_run_goes_on("elastic-early", DEFAULT_SEED, &[0, 2, 3]);
}

/// It could come back, and the others do not wait for it beyond their deadlines. The launcher may: it is not ours.
fn an_elastic_run_ends_with_a_rank_that_hangs() {
    let (_, text, _) = attempt("elastic-hang", 4, TOLERANT, &[]);
    ends(&text, &[0, 2, 3], "rank 1");
    let took = latest(&text, "ended at ").zip(latest(&text, "STOP at ")).map(|(ended, stopped)| ended - stopped);
    assert!(took.is_some_and(|took| took < 15 * TIMEOUT.as_micros()), "{took:?} us:\n{text}");
}

/// The weights of those that are left are those of threads, of which so many go on from a checkpoint of all.
fn elastic_run_goes_on(role: &str, seed: usize, left: &[usize]) {
    let (_, text, _) = job(role, 4, TOLERANT, &[(SEED, seed.to_string())]);
    let lost = 1 + seed as u64 % (ELASTIC_STEPS - 1);
    let begun = if role == "elastic-early" { 0 } else { 3 * (lost / 3) };
    let folder = env::temp_dir().join(format!("weftgrad-{role}-{}-{seed}", std::process::id()));
    let run = |ranks: usize, from: u64, to: u64| {
        let program = |comm: Comm<Cpu>| {
            let (model, mut step) = sharded(&comm)?;
            step.load(&Folder::new(&folder))?;
            (from..to).try_for_each(|k| sharded_step(&comm, &model, &mut step, k))?;
            step.save(&Folder::new(&folder), &CheckpointNotes::new())?;
            weights(&step, &model)
        };
        Ranks::new(ranks).run(|_| Ok(Cpu::with_threads(1)), program).expect("threads train").swap_remove(0)
    };
    run(4, 0, begun);
    let expected = run(left.len(), begun, ELASTIC_STEPS);
    fs::remove_dir_all(&folder).expect("checkpoints were saved");
    for rank in left {
        let line = format!("rank {rank} of {} from step {begun}: {expected:?}", left.len());
        assert!(text.contains(&line), "{role}, seed {seed}, {line}:\n{text}");
    }
}

fn without_fault_tolerance_no_run_is_elastic() {
    let (_, text, _) = job("elastic", 2, &[], &[]);
    assert!(text.matches("start with Open MPI 5 and `mpirun --with-ft ulfm`").count() >= 2, "{text}");
}

/// Runs this program as ranks; once more if the launcher itself does not end: it has been seen to deadlock when it
/// aborts a job of which a rank is stopped.
fn job(role: &str, ranks: usize, launcher: &[&str], variables: &[(&str, String)]) -> (Output, String, Duration) {
    let first = attempt(role, ranks, launcher, variables);
    if first.2 < LAUNCHER_HANGS { first } else { attempt(role, ranks, launcher, variables) }
}

fn attempt(role: &str, ranks: usize, launcher: &[&str], variables: &[(&str, String)]) -> (Output, String, Duration) {
    let root = fs::read_to_string("/proc/self/status").is_ok_and(|s| s.contains("Uid:\t0\t"));
    let own = env::current_exe().expect("this program is somewhere");
    let begun = Instant::now();
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "60", "mpirun"]).args(root.then_some("--allow-run-as-root")).arg("--oversubscribe");
    command.args(launcher).args(["-n", &ranks.to_string()]).arg(own).env(ROLE, role);
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    let output = command.output().expect("mpirun is there");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output, text, begun.elapsed())
}

/// The last time at which a rank has printed that event.
fn latest(text: &str, event: &str) -> Option<u128> {
    text.lines().filter_map(|line| line.strip_prefix(event)?.parse().ok()).max()
}

/// Requires that these ranks have said that they end, and why.
fn ends(text: &str, ranks: &[usize], why: &str) {
    for rank in ranks {
        let is_told = |line: &str| line.starts_with(&format!("rank {rank} ends:")) && line.contains(why);
        assert!(text.lines().any(is_told), "rank {rank}:\n{text}");
    }
}

fn an_error_is_told_and_the_job_fails() {
    let (output, text, _) = job("error", 3, &[], &[]);
    assert!(!output.status.success(), "{text}");
    ends(&text, &[0, 1, 2], "the file ends here");
}

fn a_panic_is_told_and_the_job_fails() {
    let (output, text, _) = job("panic", 3, &[], &[]);
    assert!(!output.status.success() && text.matches("panicked: no more data").count() >= 3, "{text}");
}

/// Runs a test with seeds of its own; more of them where the environment says so.
fn with_seeds(test: impl Fn(usize)) {
    let seeds = env::var("WEFTGRAD_TEST_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(3);
    (0..seeds).map(|turn| turn * 7 % 53).for_each(test);
}

fn survivors_of_a_killed_rank_go_on() {
    with_seeds(|seed| survivors_go_on("survive", seed));
}

fn survivors_of_a_rank_killed_while_data_moves_go_on() {
    with_seeds(|seed| survivors_go_on("survive-moving", seed));
}

/// Prints how long after the kill the last survivor had its error; a machine at work with other things decides that too, so nothing is asserted.
fn survivors_go_on(role: &str, seed: usize) {
    let (_, text, _) = job(role, 4, TOLERANT, &[(SEED, seed.to_string())]);
    if let (Some(killed), Some(error)) = (latest(&text, "KILL at "), latest(&text, "error at ")) {
        println!("{role}, seed {seed}: the last error {} ms after the kill", error.saturating_sub(killed) / 1000);
    }
    for rank in [0, 2, 3] {
        let line = format!("rank {rank} goes on: named true, Ok(([0, 2, 3], [0, 2, 3]))");
        assert!(text.contains(&line), "seed {seed}, {line}:\n{text}");
    }
}

fn without_fault_tolerance_the_job_ends() {
    let (output, text, took) = job("kill", 3, &[], &[]);
    assert!(!output.status.success() && text.contains("signal 9"), "{text}");
    assert!(text.contains("rank 1"), "{text}");
    assert!(took < Duration::from_secs(20), "{took:?}");
}

fn a_stopped_rank_is_named() {
    let (output, text, _) = job("stop", 3, &[], &[]);
    assert!(!output.status.success(), "{text}");
    ends(&text, &[0, 2], "no call from rank 1");
}

fn a_program_without_a_launcher_is_a_world_of_one() {
    let own = env::current_exe().expect("this program is somewhere");
    let output = Command::new(own).env(ROLE, "one").output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
