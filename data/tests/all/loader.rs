//! Batches depend on seed, epoch and step alone; errors, panics and early ends stay where they belong.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use data::{Array, Batch, Dataset, InMemory, Last, Loader, Share, State, order::Order};
use numcore::{Error, Result};
use runtime_cpu::Cpu;

const LEN: u64 = 103;
const BATCH: usize = 12;

/// Examples with augmentation: the random numbers must not change either.
fn loader() -> Loader<Vec<(u64, u32)>> {
    let dataset = InMemory::new((0..LEN).collect::<Vec<_>>());
    Loader::new(dataset).batch(BATCH).shuffle(7).augment(3, |example, rng| Ok((example, rng.next_u32())))
}

type Step = (u64, u64, Vec<(u64, u32)>);

/// The rows that count, of each batch.
fn steps(loader: &Loader<Vec<(u64, u32)>>, from: State, epochs: u64) -> Vec<Step> {
    let whole = |batch: Batch<Vec<(u64, u32)>>| (batch.epoch, batch.step, batch.data[..batch.count].to_vec());
    let of = |state| loader.resume(state).unwrap().map(|batch| whole(batch.unwrap())).collect::<Vec<_>>();
    let later = (from.epoch + 1..epochs).flat_map(|epoch| of(State { epoch, position: 0 }));
    of(from).into_iter().chain(later).collect()
}

fn start() -> State {
    State::default()
}

/// The rows of all ranks at each step, joined.
fn joined(ranks: usize, share: Share, last: Last, workers: usize, ahead: usize, from: State) -> Vec<Step> {
    let one = |rank| steps(&loader().rank(rank, ranks).share(share).last(last).workers(workers).ahead(ahead), from, 2);
    let own: Vec<Vec<Step>> = (0..ranks).map(one).collect();
    let join = |k: usize| {
        let (epoch, step, _) = own[0][k];
        let mut rows = Vec::new();
        match share {
            Share::Contiguous => own.iter().for_each(|steps| rows.extend_from_slice(&steps[k].2)),
            Share::Interleaved => {
                let most = own.iter().map(|steps| steps[k].2.len()).max().unwrap_or(0);
                (0..most).for_each(|i| rows.extend(own.iter().filter_map(|steps| steps[k].2.get(i))));
            }
        }
        assert!(own.iter().all(|steps| (steps[k].0, steps[k].1) == (epoch, step)));
        (epoch, step, rows)
    };
    assert!(own.iter().all(|steps| steps.len() == own[0].len()), "every rank makes as many steps");
    (0..own[0].len()).map(join).collect()
}

#[test]
fn workers_ranks_and_batches_ahead_change_nothing() {
    let reference = steps(&loader().workers(0), start(), 2);
    assert_eq!(reference.len(), 18);
    for workers in [0, 1, 2, 4] {
        for ahead in [1, 2, 8] {
            for ranks in [1, 2, 3, 4, 5, 8] {
                for share in [Share::Contiguous, Share::Interleaved] {
                    let seen = joined(ranks, share, Last::Keep, workers, ahead, start());
                    assert_eq!(seen, reference, "{workers} workers, {ahead} ahead, {ranks} ranks, {share:?}");
                }
            }
        }
    }
    // Padding adds rows that do not count, and changes nothing else.
    assert_eq!(joined(5, Share::Interleaved, Last::Pad, 2, 2, start()), reference);
    let whole: Vec<Step> = reference.iter().filter(|step| step.2.len() == BATCH).cloned().collect();
    assert_eq!(joined(8, Share::Contiguous, Last::Drop, 2, 1, start()), whole);
}

#[test]
fn a_resume_at_every_step_changes_nothing() {
    let reference = steps(&loader().workers(0), start(), 2);
    let first = loader();
    let mut batches = first.endless(start()).unwrap();
    for taken in 0..=reference.len() {
        let note = first.note(batches.state());
        for (ranks, workers, ahead) in [(1, 0, 1), (1, 2, 2), (4, 1, 8), (5, 4, 1)] {
            let state = loader().state_of(&note).unwrap();
            let mut rest = joined(ranks, Share::Contiguous, Last::Keep, workers, ahead, state);
            // An endless loader is at the start of the next epoch where the last one ended.
            rest.retain(|step| step.0 < 2);
            assert_eq!(rest, reference[taken..], "after {taken}, `{note}`");
        }
        batches.next().unwrap().unwrap();
    }
}

#[test]
fn epochs_follow_each_other_without_end() {
    let reference = steps(&loader().workers(0), start(), 4);
    for workers in [0, 3] {
        let batches = loader().workers(workers).endless(start()).unwrap();
        let seen: Vec<Step> =
            batches.take(reference.len()).map(|b| b.unwrap()).map(|b| (b.epoch, b.step, b.data)).collect();
        assert_eq!(seen, reference);
    }
    assert!(Loader::new(InMemory::<i32>::new(vec![])).endless(start()).is_err());
    assert!(Loader::new(InMemory::new(vec![1])).batch(2).last(Last::Drop).endless(start()).is_err());
    assert_eq!(Loader::new(InMemory::<i32>::new(vec![])).epoch(0).unwrap().count(), 0);
}

#[test]
fn every_example_counts_once_in_an_evaluation() {
    for (ranks, last) in [(1, Last::Keep), (4, Last::Keep), (4, Last::Pad), (8, Last::Pad)] {
        let mut seen = Vec::new();
        for rank in 0..ranks {
            let numbers = Loader::new(InMemory::new((0..30i64).collect::<Vec<_>>()))
                .batch(8)
                .rank(rank, ranks)
                .last(last)
                .stack();
            for batch in numbers.epoch(0).unwrap() {
                let batch = batch.unwrap();
                assert_eq!(batch.data.dims()[0], batch.rows);
                assert!(last == Last::Keep || batch.rows == 8 / ranks, "padded batches have one shape");
                let values = batch.data.to_vec::<i64>().unwrap();
                seen.extend(values.iter().zip(batch.weights()).filter(|(_, w)| *w > 0.0).map(|(v, _)| *v));
                assert_eq!(batch.total, if batch.step == 3 { 6 } else { 8 });
            }
        }
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..30), "{ranks} ranks, {last:?}");
    }
}

/// A dataset in which every seventh example is malformed.
struct Faulty;

impl Dataset for Faulty {
    type Example = i64;

    fn len(&self) -> usize {
        40
    }

    fn get(&self, index: usize) -> Result<i64> {
        match index % 14 {
            7 => Err(Error::format("numbers.txt", format!("line {index}: not a number"))),
            _ => Ok(index as i64),
        }
    }
}

#[test]
fn errors_travel_with_their_batch() {
    for workers in [0, 1, 4] {
        let read: Vec<_> = Loader::new(Faulty).batch(4).workers(workers).stack().epoch(3).unwrap().collect();
        assert_eq!(read.len(), 10);
        for (step, batch) in read.into_iter().enumerate() {
            match batch {
                Ok(batch) => assert_eq!(batch.data.to_vec::<i64>().unwrap()[0], 4 * step as i64),
                Err(error) => {
                    let bad =
                        [7, 21, 35].into_iter().find(|bad| bad / 4 == step).expect("a step with a malformed example");
                    let text = format!("numbers.txt: line {bad}: not a number (example {bad} of epoch 3)");
                    assert_eq!(error.to_string(), text);
                }
            }
        }
    }
}

#[test]
fn errors_of_later_steps_name_the_example() {
    let refuse = |x: i64| if x == 5 { Err(Error::argument("own", "no five")) } else { Ok(x) };
    let numbers = || InMemory::new((0..10i64).collect::<Vec<_>>());
    let read = |loader: Loader<Vec<i64>>| loader.batch(5).epoch(1).unwrap().filter_map(|b| b.err()).collect::<Vec<_>>();
    for errors in
        [read(Loader::new(numbers()).map(refuse)), read(Loader::new(numbers()).augment(0, move |x, _| refuse(x)))]
    {
        assert_eq!(errors.len(), 1);
        assert_eq!(errors[0].to_string(), "own: no five (example 5 of epoch 1)");
    }
}

#[test]
fn steps_by_example_come_before_the_number_changes() {
    let doubled = || Loader::new(InMemory::new(vec![1, 2])).batch(2).collate(|all| Ok([all.clone(), all].concat()));
    for loader in [doubled().map(Ok), doubled().augment(0, |x, _| Ok(x))] {
        let error = loader.epoch(0).unwrap().next().unwrap().unwrap_err().to_string();
        assert!(error.contains("4 values where the batch has 2 examples"), "{error}");
    }
}

#[test]
fn a_panic_is_an_error_where_its_batch_is_taken() {
    let panics = |x: i64| if x == 9 { panic!("nine") } else { Ok(x) };
    for workers in [0, 2] {
        let numbers = InMemory::new((0..20i64).collect::<Vec<_>>());
        let mut batches = Loader::new(numbers).batch(4).workers(workers).map(panics).epoch(0).unwrap();
        assert!(batches.next().unwrap().is_ok() && batches.next().unwrap().is_ok());
        let error = batches.next().unwrap().unwrap_err().to_string();
        assert!(error.contains("panicked: nine"), "{error}");
        assert_eq!(batches.next().unwrap().unwrap().data, [12, 13, 14, 15]);
        let numbers = InMemory::new((0..4i64).collect::<Vec<_>>());
        let read: Vec<_> = Loader::new(numbers).order(Panics).workers(workers).epoch(0).unwrap().collect();
        let errors = read.iter().filter_map(|batch| Some(batch.as_ref().err()?.to_string())).collect::<Vec<_>>();
        assert!(read.len() == 4 && matches!(&errors[..], [one] if one.contains("panicked: two")), "{errors:?}");
        assert_eq!(read[3].as_ref().unwrap().data, [3]);
    }
}

/// An order that panics for positions from 1 on.
struct Panics;

impl Order for Panics {
    fn len(&self) -> u64 {
        4
    }

    fn indices(&self, _: u64, positions: std::ops::Range<u64>) -> Vec<u64> {
        assert!(positions.start != 1, "two");
        positions.collect()
    }

    fn describe(&self) -> String {
        "panics".into()
    }
}

#[test]
fn augmentation_is_keyed_by_seed_epoch_and_example() {
    for epoch in 0..3 {
        for batch in loader().epoch(epoch).unwrap() {
            for (example, drawn) in batch.unwrap().data {
                assert_eq!(drawn, data::random::keyed(3, epoch, example).next_u32());
            }
        }
    }
}

#[test]
fn a_mixture_augments_an_example_that_it_repeats_in_another_way() {
    use data::order::Mixture;
    for workers in [0, 2] {
        let loader = Loader::new(InMemory::new((0..10u64).collect::<Vec<_>>())).batch(8).workers(workers);
        let mixture = Mixture::new(&[(8, 0.5), (2, 0.5)], 1).unwrap().epoch_of(24);
        let loader = loader.order(mixture).augment(3, |example, rng| Ok((example, rng.next_u32())));
        let mut drawn = Vec::new();
        for batch in (0..2).flat_map(|epoch| loader.epoch(epoch).unwrap()) {
            drawn.extend(batch.unwrap().data);
        }
        assert_eq!(drawn.iter().filter(|(example, _)| *example >= 8).count(), 24, "each of two, twelve times");
        drawn.sort_unstable();
        assert!(drawn.windows(2).all(|pair| pair[0] != pair[1]), "{drawn:?}");
    }
}

/// A dataset that takes 1 ms per example.
struct Slow(Arc<AtomicUsize>);

impl Dataset for Slow {
    type Example = ();

    fn len(&self) -> usize {
        10_000
    }

    fn get(&self, _index: usize) -> Result<()> {
        self.0.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(std::time::Duration::from_millis(1));
        Ok(())
    }
}

#[test]
fn a_batch_that_nobody_wants_is_not_finished() {
    let read = Arc::new(AtomicUsize::new(0));
    let loader = Loader::new(Slow(Arc::clone(&read))).batch(10_000);
    drop(loader.epoch(0).unwrap());
    assert!(read.load(Ordering::SeqCst) < 10_000);
}

/// A dataset that counts reads, and whose examples count references to it.
struct Counting {
    read: Arc<AtomicUsize>,
    alive: Arc<()>,
}

impl Dataset for Counting {
    type Example = Arc<()>;

    fn len(&self) -> usize {
        1_000_000
    }

    fn get(&self, _index: usize) -> Result<Arc<()>> {
        self.read.fetch_add(1, Ordering::SeqCst);
        Ok(Arc::clone(&self.alive))
    }
}

#[test]
fn dropping_the_batches_ends_the_threads() {
    let (read, alive) = (Arc::new(AtomicUsize::new(0)), Arc::new(()));
    let dataset = Counting { read: Arc::clone(&read), alive: Arc::clone(&alive) };
    let loader = Loader::new(dataset).batch(10).workers(4).ahead(3);
    let mut batches = loader.epoch(0).unwrap();
    (0..5).for_each(|_| drop(batches.next().unwrap().unwrap()));
    drop(batches);
    let after = read.load(Ordering::SeqCst);
    // Five taken, and at most three ahead and one given up half read for each of four workers.
    assert!(after <= 10 * (5 + 4 * 4), "{after} were read");
    drop(loader);
    assert_eq!((Arc::strong_count(&alive), read.load(Ordering::SeqCst)), (1, after), "no thread is left");
}

#[test]
fn workers_are_no_further_ahead_than_they_may() {
    let read = Arc::new(AtomicUsize::new(0));
    let dataset = Counting { read: Arc::clone(&read), alive: Arc::new(()) };
    let loader = Loader::new(dataset).batch(1).workers(2).ahead(2);
    let mut batches = loader.epoch(0).unwrap();
    for taken in 1..200 {
        batches.next().unwrap().unwrap();
        // Two workers, each two ahead.
        assert!(read.load(Ordering::SeqCst) <= taken + 4, "{} after {taken}", read.load(Ordering::SeqCst));
    }
}

#[test]
fn numbers_that_make_no_sense_are_refused() {
    let loader = || Loader::new(InMemory::new(vec![1, 2, 3]));
    for (loader, says) in [
        (loader().batch(0), "a batch of 0 examples"),
        (loader().rank(2, 2), "rank is 2, and must be in 0..2"),
        (loader().rank(0, 0), "rank is 0, and must be in 0..0"),
        (loader().ahead(0), "0 batches ahead"),
        (loader().batch(usize::MAX).last(Last::Pad), "are padded from 3"),
    ] {
        let error = loader.epoch(0).unwrap_err().to_string();
        assert!(error.contains(says) && loader.steps().is_err(), "{error}");
    }
    assert!(loader().ahead(0).workers(0).epoch(0).is_ok());
    assert_eq!(loader().batch(2).steps().unwrap(), 2);
    let error = loader().resume(State { epoch: 1, position: 4 }).unwrap_err().to_string();
    assert!(error.contains("position is 4, and must be at most 3"), "{error}");
    assert_eq!(loader().batch(usize::MAX).epoch(0).unwrap().count(), 1);
}

#[test]
fn notes_of_another_order_are_refused() {
    let loader = loader();
    let state = State { epoch: 2, position: 24 };
    let note = loader.note(state);
    assert_eq!(note, "epoch 2 position 24 of 103 shuffled seed 7");
    assert_eq!(loader.state_of(&note).unwrap(), state);
    for wrong in ["", "epoch 2 position 24", "x of 103 shuffled seed 7", "epoch 2 position 24 of 103 shuffled seed 8"] {
        assert!(loader.state_of(wrong).unwrap_err().to_string().contains(wrong));
    }
}

/// An order with indices beyond the dataset, and too few of them in the second epoch.
struct Wrong;

impl Order for Wrong {
    fn len(&self) -> u64 {
        4
    }

    fn indices(&self, epoch: u64, positions: std::ops::Range<u64>) -> Vec<u64> {
        positions.skip(epoch as usize).map(|p| p + 100).collect()
    }

    fn describe(&self) -> String {
        "wrong".into()
    }
}

#[test]
fn an_order_of_other_examples_is_an_error_per_batch() {
    let read: Vec<_> = Loader::new(InMemory::new(vec![1, 2])).order(Wrong).epoch(0).unwrap().collect();
    assert!(read.len() == 4 && read.iter().all(|batch| batch.is_err()));
    let error = Loader::new(InMemory::new(vec![1, 2])).order(Wrong).epoch(1).unwrap().next().unwrap().unwrap_err();
    let says = "`wrong` gave 0 examples for 1 positions from epoch 1 position 0 on";
    assert!(error.to_string().contains(says), "{error}");
}

#[test]
fn batches_arrive_on_the_device() {
    let cpu = Cpu::new();
    let x = data::Rows::new(Array::new([10, 2], (0..20).map(|i| i as f32).collect()).unwrap()).unwrap();
    let y = InMemory::new((0..10i64).collect::<Vec<_>>());
    let loader = Loader::new(x.zip(y).unwrap()).batch(4).shuffle(1).stack().on(&cpu);
    let mut batches = loader.epoch(0).unwrap();
    let mut seen = 0;
    for batch in batches.by_ref() {
        let (x, y) = batch.unwrap().data;
        let (x, y) = (x.to_vec::<f32>().unwrap(), y.to_vec::<i64>().unwrap());
        assert!(x.chunks(2).zip(&y).all(|(x, &y)| x == [2.0 * y as f32, 2.0 * y as f32 + 1.0]));
        seen += y.len();
    }
    assert_eq!(seen, 10);
    assert!(batches.waited() >= batches.last_wait());
}

#[test]
fn types_of_ones_own_pass_through_collate() {
    #[derive(Debug, PartialEq)]
    struct Sum(i64);
    let loader = Loader::new(InMemory::new((1..=6i64).collect::<Vec<_>>())).batch(3);
    let sums: Vec<Sum> =
        loader.collate(|all| Ok(Sum(all.into_iter().sum()))).epoch(0).unwrap().map(|b| b.unwrap().data).collect();
    assert_eq!(sums, [Sum(6), Sum(15)]);
}
