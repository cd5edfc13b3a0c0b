//! Worlds that ranks leave and join: what follows is, to the bit, what follows in a fresh run of that size from that commit.

use std::thread;

use adaptive::elastic::Restored;
use distributed::comm::ThreadSeat;

use crate::{
    prelude::*,
    worlds::{self, Newcomer, elastic, rendezvous},
};

const LENGTH: u64 = 8;
/// Commits are made after every second step.
const EVERY: u64 = 2;

/// What a world began with: its size, and the commit it took up.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Began {
    generation: u64,
    ranks: usize,
    from: Option<Restored>,
}

/// What became of an elastic run.
#[derive(Default)]
pub struct Story {
    began: Mutex<Vec<Began>>,
    /// The last step that any rank has taken.
    step: AtomicU64,
}

impl Story {
    /// Trains to the end: final weights.
    pub fn train(
        &self,
        world: &mut ElasticWorld<Cpu>,
        how: ZeroStage,
        befalls: &dyn Fn(&ElasticWorld<Cpu>, u64) -> Result<()>,
    ) -> Result<Vec<f64>> {
        let comm = world.comm()?;
        let model = Mlp::new(&Init::new(comm.runtime(), world.generation()).dtype(DType::F64))?;
        let mut trainer = Any::new(&comm, &model, how, config())?;
        let from = world.restore(&mut trainer.0)?;
        if comm.rank() == 0 {
            let began = Began { generation: world.generation(), ranks: comm.size(), from: from.clone() };
            self.began.lock().unwrap().push(began);
        }
        let mut step = from.map_or(0, |from| from.step);
        commit(world, &trainer, step)?;
        while step < LENGTH {
            befalls(world, step)?;
            trainer.step(&model, &comm, step as usize)?;
            step += 1;
            self.step.fetch_max(step, Ordering::SeqCst);
            if step % EVERY == 0 {
                commit(world, &trainer, step)?;
            }
        }
        trainer.weights(&model)
    }

    /// The weights of fresh runs that begin where the worlds began, from checkpoints.
    fn replayed(&self, how: ZeroStage) -> Vec<f64> {
        let mut began = self.began.lock().unwrap().clone();
        began.sort_by_key(|began| began.generation);
        let scratch = Scratch::new("elastic");
        let folder = |generation: u64| Folder::new(scratch.0.join(generation.to_string()));
        let mut last = Vec::new();
        for world in &began {
            // Where others went on from.
            let steps = began.iter().filter_map(|later| later.from.as_ref());
            let saved: Vec<u64> = steps.filter(|f| f.generation == world.generation).map(|f| f.step).collect();
            let program = |comm| {
                let model = Mlp::new(&Init::new(Communicator::runtime(&comm), 0).dtype(DType::F64))?;
                let mut trainer = Any::new(&comm, &model, how, config())?;
                let mut step = 0;
                if let Some(from) = &world.from {
                    let at = folder(from.generation);
                    at.load(&comm, from.step, &mut trainer.0)?;
                    step = from.step;
                }
                loop {
                    if saved.contains(&step) {
                        trainer.save(&folder(world.generation))?;
                    }
                    if step == LENGTH {
                        return trainer.weights(&model);
                    }
                    trainer.step(&model, &comm, step as usize)?;
                    step += 1;
                }
            };
            last =
                Ranks::new(world.ranks).run(cpu, program).unwrap_or_else(|e| panic!("{began:?}: {e}")).swap_remove(0);
        }
        last
    }
}

fn commit(world: &mut ElasticWorld<Cpu>, trainer: &Any, step: u64) -> Result<()> {
    let notes = CheckpointNotes::from([("step".into(), step.to_string())]);
    world.commit(step, &trainer.0, &notes)
}

/// Runs on so many ranks that lose those which `befalls` makes fail: the story, and every rank's outcome.
fn run(
    ranks: usize,
    how: ZeroStage,
    copies: usize,
    befalls: impl Fn(&ElasticWorld<Cpu>, u64) -> Result<()> + Sync,
) -> (Story, Vec<Result<Vec<f64>>>) {
    let story = Story::default();
    let outcomes = elastic(ranks, copies, |world| story.train(world, how, &befalls));
    (story, outcomes)
}

pub fn gone() -> Error {
    Error::argument("the machine", "is gone")
}

/// Requires that so many ranks came to the end, all with the weights of the fresh runs.
fn require_replay(story: &Story, outcomes: &[Result<Vec<f64>>], how: ZeroStage, left: usize, what: &str) {
    let done: Vec<&Vec<f64>> = outcomes.iter().flatten().collect();
    let began = story.began.lock().unwrap().clone();
    let errors: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
    assert_eq!(done.len(), left, "{what}: {began:?}, {errors:?}");
    let expected = story.replayed(how);
    assert!(done.iter().all(|own| **own == expected), "{what}: other weights than in fresh runs, {began:?}");
}

#[test]
fn survivors_go_on_as_a_fresh_run_of_their_size() {
    for how in STAGES {
        for (ranks, lost) in [(2, 1), (3, 0), (5, 2)] {
            let at = 1 + (lost as u64 + ranks as u64) % (LENGTH - 1);
            let befalls = |world: &ElasticWorld<Cpu>, step: u64| match world.comm()?.rank() {
                rank if (world.generation(), rank, step) == (0, lost, at) => Err(gone()),
                _ => Ok(()),
            };
            let (story, outcomes) = run(ranks, how, 1, befalls);
            let what = format!("{how:?}, rank {lost} of {ranks} lost at step {at}");
            require_replay(&story, &outcomes, how, ranks - 1, &what);
            let began = story.began.lock().unwrap();
            let from = began[1].from.as_ref().unwrap();
            assert_eq!((from.step, from.ranks), (at / EVERY * EVERY, ranks), "{what}");
            assert_eq!(from.notes["step"], from.step.to_string());
            assert!(matches!(outcomes[lost].as_ref().unwrap_err().kind(), ErrorKind::Argument { .. }), "{what}");
        }
    }
}

#[test]
fn as_many_neighbours_are_lost_at_once_as_there_are_copies() {
    let how = ZeroStage::Parameters;
    let lost = |first: usize, second: usize| {
        // Otherwise one could hear of the other's end first, and go on.
        let both = Barrier::new(2);
        move |world: &ElasticWorld<Cpu>, step: u64| match world.comm()?.rank() {
            rank if (world.generation(), step) == (0, 5) && (rank == first || rank == second) => {
                both.wait();
                Err(gone())
            }
            _ => Ok(()),
        }
    };
    for (copies, first, second) in [(2, 1, 2), (2, 3, 0), (1, 0, 2)] {
        let (story, outcomes) = run(4, how, copies, lost(first, second));
        require_replay(&story, &outcomes, how, 2, &format!("{copies} copies, {first} and {second} lost"));
    }
    // Of two machines one is lost, where a copy is on the other; messages have a few bytes.
    for hosts in [[0, 0, 1, 1], [0, 1, 0, 1]] {
        let (first, second) = if hosts[1] == 0 { (0, 1) } else { (1, 3) };
        let (story, (_rendezvous, seats)) = (Story::default(), rendezvous(4, Quorum::default()));
        let befalls = lost(first, second);
        let program = |world: &mut ElasticWorld<Cpu>| story.train(world, how, &befalls);
        let outcomes = thread::scope(|scope| {
            let rank = |(seat, host): (ThreadSeat<Cpu>, i32)| {
                let elastic = Elastic::new(seat).host(host.to_string()).message_limit(100);
                scope.spawn(move || elastic.run(program))
            };
            let ranks: Vec<_> = seats.into_iter().zip(hosts).map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        });
        require_replay(&story, &outcomes, how, 2, &format!("machines {hosts:?}"));
    }
    // The piece of rank 1 was on ranks 1 and 2.
    let (story, outcomes) = run(4, how, 1, lost(1, 2));
    for rank in [0, 3] {
        let told = outcomes[rank].as_ref().unwrap_err().to_string();
        assert!(told.contains("no rank holds the pieces of ranks [1]") && told.contains("last checkpoint"), "{told}");
    }
    assert_eq!(story.began.lock().unwrap().len(), 1, "nobody began anew");
}

#[test]
fn worlds_shrink_again_and_again_down_to_one() {
    for how in [ZeroStage::None, ZeroStage::Gradients] {
        let befalls = |world: &ElasticWorld<Cpu>, step: u64| {
            let last = world.comm()?.rank() + 1 == world.comm()?.size();
            // Worlds 0, 1 and 2 lose a rank each, the second before its first commit after the restore.
            if world.generation() < 3 && last && step == [3, 2, 5][world.generation() as usize] {
                Err(gone())
            } else {
                Ok(())
            }
        };
        let (story, outcomes) = run(4, how, 1, befalls);
        require_replay(&story, &outcomes, how, 1, &format!("{how:?}"));
        let sizes: Vec<usize> = story.began.lock().unwrap().iter().map(|began| began.ranks).collect();
        assert_eq!(sizes, [4, 3, 2, 1]);
    }
}

/// Runs two ranks, which one more joins when they are at step 3; newcomers run `program`, whose first argument is the story.
fn joined(
    how: ZeroStage,
    faults: impl Fn(usize) -> Vec<(u64, u64, Fault)>,
    newcomer: impl Fn(&Story, &mut ElasticWorld<Cpu>) -> Result<Vec<f64>> + Sync,
) -> (Story, Vec<Result<Vec<f64>>>) {
    let story = Story::default();
    let first = |world: &mut ElasticWorld<Cpu>, newcomer: &Newcomer| {
        let befalls = |world: &ElasticWorld<Cpu>, step: u64| {
            if (world.generation(), world.comm()?.rank(), step) == (0, 0, 3) {
                newcomer.come();
            }
            Ok(())
        };
        story.train(world, how, &befalls)
    };
    let outcomes = worlds::joined(2, faults, first, |own| own.run(|world| newcomer(&story, world)));
    (story, outcomes)
}

#[test]
fn a_newcomer_is_taken_in_after_a_commit() {
    for how in STAGES {
        let (story, outcomes) = joined(how, |_| Vec::new(), |story, world| story.train(world, how, &|_, _| Ok(())));
        require_replay(&story, &outcomes, how, 3, &format!("{how:?}"));
        let began = story.began.lock().unwrap();
        let [first, second] = &began[..] else { panic!("{began:?}") };
        assert_eq!((first.ranks, second.ranks, second.from.as_ref().map(|from| from.step)), (2, 3, Some(4)));
    }
}

#[test]
fn a_newcomer_that_does_not_fit_is_left_behind() {
    let how = ZeroStage::None;
    let (story, outcomes) = joined(
        how,
        |_| Vec::new(),
        |_, world| {
            let comm = world.comm()?;
            let model = Gpt::new(&Init::new(comm.runtime(), 0), Default::default())?;
            let mut step = Any::over(&comm, &model, how, config())?.0;
            world.restore(&mut step)?;
            Ok(Vec::new())
        },
    );
    assert!(outcomes[2].is_err());
    require_replay(&story, &outcomes, how, 2, "the two that were there");
}

#[test]
fn a_world_of_newcomers_alone_does_not_begin_anew() {
    // Both ranks of the first world fail in the first call of the second, before the newcomer has anything.
    let faults = |_| vec![(1, 0, Fault::Error)];
    let (_, outcomes) =
        joined(ZeroStage::None, faults, |story, world| story.train(world, ZeroStage::None, &|_, _| Ok(())));
    let told = outcomes[2].as_ref().unwrap_err().to_string();
    assert!(told.contains("no rank of this world has a commit of the run"), "{told}");
    assert!(outcomes.iter().all(Result::is_err));
}

#[test]
fn too_few_ranks_are_no_world() {
    let quorums = [
        (Quorum { min_ranks: 2, join_timeout: Duration::from_millis(50), ..Quorum::default() }, "at least 2"),
        (Quorum { majority: true, ..Quorum::default() }, "no majority"),
    ];
    for (quorum, expected) in quorums {
        let (story, (_rendezvous, seats)) = (Story::default(), rendezvous(2, quorum));
        let befalls = |world: &ElasticWorld<Cpu>, step: u64| match (world.comm()?.rank(), step) {
            (1, 3) => Err(gone()),
            _ => Ok(()),
        };
        let outcomes =
            Elastic::on_threads(seats, |elastic| elastic, |world| story.train(world, ZeroStage::None, &befalls));
        let told = outcomes[0].as_ref().unwrap_err().to_string();
        assert!(told.contains(expected), "{told}");
    }
}

#[test]
fn nothing_is_committed_before_the_world_has_taken_up_what_there_was() {
    let outcomes = elastic(2, 1, |world| {
        let comm = world.comm()?;
        let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
        commit(world, &Any::new(&comm, &model, ZeroStage::None, config())?, 0)
    });
    refused(outcomes, &["call `restore` in each world"]);
}

#[test]
fn ranks_that_train_by_themselves_between_meetings_go_on() {
    let made = |comm: &Comm<Cpu>| {
        let model = Mlp::new(&Init::new(comm.runtime(), 0).dtype(DType::F64))?;
        let inner = simple(comm.runtime(), &model, config())?;
        let options = LocalUpdates { every: Some(4), ..Default::default() };
        let step = LocalSteps::new(comm, &model, inner, DiLoCo::default(), options)?;
        Ok::<_, Error>((model, step))
    };
    // A rank is lost between two synchronizations, where nothing can be committed.
    for (ranks, then) in [(3, 2), (4, 3)] {
        let story = Mutex::new(None);
        let outcomes = elastic(ranks, 1, |world| {
            let comm = world.comm()?;
            let (model, mut step) = made(&comm)?;
            let from = world.restore(&mut step)?;
            *story.lock().unwrap() = from.clone();
            world.commit(step.global_step(), &step, &CheckpointNotes::new())?;
            for k in from.map_or(0, |from| from.step)..LENGTH {
                if (world.generation(), comm.rank(), k) == (0, 1, 5) {
                    return Err(gone());
                }
                step.step(|_| model.loss(comm.runtime(), k as usize, &own(&comm)))?;
                let committed = world.commit(k + 1, &step, &CheckpointNotes::new());
                if (k + 1) % 4 == 0 {
                    committed?;
                    continue;
                }
                // Or another rank was lost.
                let error = committed.unwrap_err();
                if !error.to_string().contains("right after a synchronization") {
                    assert_eq!((world.generation(), k), (0, 5), "{error}");
                    return Err(error);
                }
            }
            step.synchronize()?;
            weights(&model)
        });
        let begun = story.lock().unwrap().clone().unwrap().step;
        assert_eq!(begun, 4);
        let scratch = Scratch::new("elastic-local");
        let fresh = |ranks: usize, from: u64, to: u64| {
            let program = |comm: Comm<Cpu>| {
                let (model, mut step) = made(&comm)?;
                scratch.folder().load_latest(&comm, &mut step)?;
                for k in from..to {
                    step.step(|_| model.loss(comm.runtime(), k as usize, &own(&comm)))?;
                }
                scratch.folder().save(&comm, to, &step, &Default::default())?;
                if to == LENGTH {
                    step.synchronize()?;
                }
                weights(&model)
            };
            Ranks::new(ranks).run(cpu, program).unwrap().swap_remove(0)
        };
        fresh(ranks, 0, begun);
        let expected = fresh(then, begun, LENGTH);
        let done: Vec<&Vec<f64>> = outcomes.iter().flatten().collect();
        assert_eq!(done.len(), then);
        assert!(done.iter().all(|own| **own == expected), "{ranks} ranks, then {then}");
    }
}
