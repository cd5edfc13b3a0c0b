//! Streams: order, state, shares, and errors in their place.

use std::io::Write;

use crate::common::Folder;
use data::stream::{Replay, Stream, StreamLoader, StreamState, lines};
use flate2::{Compression, write::GzEncoder};
use numcore::{Error, ErrorKind, Result};

/// A stream of the numbers below `n`, with errors for those in `bad`.
fn numbers(n: u64, bad: &'static [u64]) -> Result<impl Stream<Example = u64>> {
    let one = move |x| if bad.contains(&x) { Err(Error::format("numbers", format!("record {x}"))) } else { Ok(x) };
    Replay::new(move || Ok((0..n).map(one)))
}

fn rest<S: Stream>(stream: &mut S) -> Vec<S::Example> {
    std::iter::from_fn(|| stream.next()).map(|example| example.unwrap()).collect()
}

#[test]
fn shuffled_blocks_are_resumed_anywhere() {
    for (n, block) in [(0, 3), (10, 4), (12, 4), (5, 100), (7, 1), (3, 0)] {
        let fresh = || numbers(n, &[]).unwrap().shuffle(block, 5);
        let whole = rest(&mut fresh());
        for (i, part) in whole.chunks(block.max(1)).enumerate() {
            let mut part = part.to_vec();
            part.sort_unstable();
            assert!(
                part.into_iter().eq((i * block.max(1)) as u64..n.min(((i + 1) * block.max(1)) as u64)),
                "{n} by {block}"
            );
        }
        let mut stream = fresh();
        for taken in 0..=whole.len() {
            let mut resumed = fresh();
            resumed.restore(&stream.state().to_string().parse().unwrap()).unwrap();
            assert_eq!(rest(&mut resumed), whole[taken..], "{n} by {block} after {taken}");
            stream.next();
        }
    }
    let blocks = rest(&mut numbers(40, &[]).unwrap().shuffle(20, 5));
    let again: Vec<u64> = blocks[20..].iter().map(|x| x - 20).collect();
    assert_ne!(blocks[..20], again, "every block has an order of its own");
    let order = |seed| rest(&mut numbers(50, &[]).unwrap().shuffle(50, seed));
    assert!(order(1) != order(2) && !order(1).is_sorted());
}

#[test]
fn states_of_something_else_are_refused() {
    let restore = |state: &str| {
        let error = numbers(10, &[]).unwrap().shuffle(4, 0).restore(&state.parse().unwrap()).unwrap_err();
        error.to_string()
    };
    for (state, says) in [
        ("3", "at least two integers"),
        ("1 2 3 4", "has 1 integers"),
        ("0 0 5", "more examples of its block"),
        ("11 0 0", "at most 10, the number of examples"),
    ] {
        assert!(restore(state).contains(says), "{}", restore(state));
    }
    for text in ["", "1 x", "-1"] {
        assert!(text.parse::<StreamState>().is_err(), "{text:?}");
    }
}

#[test]
fn ranks_share_batches_and_any_step_resumes() {
    let loader = |rank, ranks, ahead| {
        StreamLoader::new(|| Ok(numbers(23, &[])?.shuffle(7, 1))).batch(5).rank(rank, ranks).ahead(ahead)
    };
    let whole: Vec<Vec<u64>> = loader(0, 1, 1).start().unwrap().map(|b| b.unwrap().data).collect();
    assert_eq!(whole.iter().map(Vec::len).collect::<Vec<_>>(), [5, 5, 5, 5, 3]);
    let mut first = loader(0, 1, 2).start().unwrap();
    for taken in 0..=whole.len() {
        for ranks in [1, 2, 3, 4, 8] {
            let own: Vec<Vec<Vec<u64>>> = (0..ranks)
                .map(|rank| {
                    let batches = loader(rank, ranks, 8).resume(&first.state()).unwrap();
                    let own = batches.map(|b| b.unwrap()).inspect(|b| assert!(b.rows >= 1 && b.data.len() == b.rows));
                    own.map(|b| b.data[..b.count].to_vec()).collect()
                })
                .collect();
            let joined: Vec<Vec<u64>> =
                (0..whole.len() - taken).map(|k| own.iter().flat_map(|batches| batches[k].clone()).collect()).collect();
            assert_eq!(joined, whole[taken..], "{ranks} ranks after {taken}");
        }
        first.next();
    }
}

#[test]
fn errors_stay_in_their_batch() {
    let batches: Vec<_> = StreamLoader::new(|| numbers(12, &[4, 5])).batch(3).start().unwrap().collect();
    assert_eq!(batches.len(), 4);
    for (k, batch) in batches.into_iter().enumerate() {
        match batch {
            Ok(batch) => assert_eq!(batch.data[0], 3 * k as u64),
            Err(error) => assert_eq!((k, error.to_string()), (1, "numbers: record 4 (step 1)".into())),
        }
    }
}

#[test]
fn loaders_that_make_no_sense_are_refused() {
    let loader = || StreamLoader::new(|| numbers(3, &[]));
    for (wrong, says) in [
        (loader().batch(0), "a batch of 0 examples"),
        (loader().rank(1, 1), "rank is 1, and must be in 0..1"),
        (loader().ahead(0), "0 batches ahead"),
    ] {
        let error = wrong.start().unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
        assert_eq!(
            matches!(error.kind(), ErrorKind::Config { field, .. } if says.contains(*field)),
            !says.contains("rank")
        );
    }
    assert!(loader().resume(&StreamState(vec![4])).unwrap_err().to_string().contains("at most 3, the number"));
    assert!(loader().batch(2).start().unwrap().nth(1).unwrap().unwrap().data.len() == 1);
    let two = |x: i32| if x == 2 { panic!("two") } else { Ok(x) };
    let loader = StreamLoader::new(move || Replay::new(move || Ok((0..6).map(two)))).batch(2);
    let mut panics = loader.start().unwrap();
    let read: Vec<_> = panics.by_ref().map(|batch| batch.map(|b| b.data).map_err(|e| e.to_string())).collect();
    assert!(read[1].as_ref().unwrap_err().contains("panicked: two"), "{read:?}");
    assert_eq!((read.len(), &read[2], panics.state()), (3, &Ok(vec![4, 5]), StreamState(vec![6])));
    // Dropped in the middle of a stream without end.
    let endless = StreamLoader::new(|| Replay::new(|| Ok((0u64..).map(Ok)))).batch(1000);
    drop(endless.start().unwrap().next());
}

fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn lines_of_plain_and_packed_files_follow_each_other() {
    let folder = Folder::new("lines");
    // Members of gzip one after another, as tools that compress in parallel write, with zeros behind them.
    let packed = [gz(b"three\r\rfo"), gz(b"ur\rfi"), vec![0; 9], gz(b"ve"), vec![0; 9]].concat();
    let paths = [folder.file("a", "\u{feff}one\r\n\u{feff}two"), folder.file("b.gz", packed), folder.file("c", "")];
    let mut stream = lines(&paths).unwrap();
    assert_eq!(rest(&mut stream), ["one", "\u{feff}two", "three", "four", "five"]);
    stream.restore(&StreamState(vec![2])).unwrap();
    assert_eq!(stream.next().unwrap().unwrap(), "three");
    assert!(lines(&[folder.path("none")]).err().unwrap().to_string().contains("none"));
}

#[test]
fn damaged_lines_leave_the_rest() {
    let folder = Folder::new("damaged-lines");
    let text: String = (0..5000).map(|i| format!("line {}\n", i * 7919 % 5003)).collect();
    let packed = gz(text.as_bytes());
    let paths = [
        folder.file("bytes", b"good\n\xff\xff\nbetter\n"),
        folder.file("cut.gz", &packed[..packed.len() * 2 / 3]),
        folder.file("after", "after\n"),
    ];
    let mut stream = lines(&paths).unwrap();
    let read: Vec<Result<String>> = std::iter::from_fn(|| stream.next()).collect();
    let errors: Vec<String> = read.iter().filter_map(|line| line.as_ref().err().map(|e| e.to_string())).collect();
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(
        errors[0].contains("bytes: line 2: is no UTF-8 text") && errors[1].contains("cut.gz: after line"),
        "{errors:?}"
    );
    let good: Vec<&str> = read.iter().filter_map(|line| line.as_deref().ok()).collect();
    assert!(good.len() > 1000 && good[..2] == ["good", "better"] && good.last() == Some(&"after"));
}
