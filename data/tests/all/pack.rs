//! Packing loses no token, crosses no document, and pads little.

use data::{
    Array, Dataset, Loader,
    pack::{Packed, PackedRow, best_fit, first_fit},
};

/// Documents of these lengths; no token occurs twice.
fn documents(lengths: &[usize]) -> Vec<Vec<u32>> {
    let mut next = 1;
    let mut document = |&len: &usize| (0..len).map(|_| (next, next += 1).0).collect();
    lengths.iter().map(&mut document).collect()
}

/// Checks the properties of every row, for any packing.
fn check_rows(packed: &Packed<Vec<Vec<u32>>>, documents: &[Vec<u32>], context: usize) {
    let rows: Vec<PackedRow> = (0..packed.len()).map(|i| packed.get(i).unwrap()).collect();
    let mut seen = Vec::new();
    for row in &rows {
        for list in [&row.tokens, &row.targets, &row.positions, &row.segments] {
            assert_eq!(list.len(), context);
        }
        for at in 0..context {
            let (token, segment) = (row.tokens[at], row.segments[at]);
            if segment == 0 {
                assert_eq!((token, row.targets[at], row.positions[at], row.weights[at]), (0, 0, 0, 0.0));
                assert!(row.segments[at..].iter().all(|&s| s == 0), "padding is at the end");
                continue;
            }
            seen.push(token);
            let document = documents.iter().find(|document| document.contains(&token)).expect("from a document");
            let next = document.iter().position(|&t| t == token).and_then(|i| document.get(i + 1)).copied();
            assert_eq!((next.unwrap_or(0), next.map_or(0.0, |_| 1.0)), (row.targets[at], row.weights[at]));
            let goes_on = at > 0 && row.segments[at - 1] == segment;
            assert_eq!(row.positions[at], if goes_on { row.positions[at - 1] + 1 } else { 0 });
            if goes_on {
                assert_eq!(row.targets[at - 1], token);
            }
        }
    }
    seen.sort_unstable();
    let mut all: Vec<u32> = documents.concat();
    all.sort_unstable();
    assert_eq!(seen, all, "every token once");
    let used = all.len() as f64 / (rows.len() * context).max(1) as f64;
    assert!((packed.padding() - if rows.is_empty() { 0.0 } else { 1.0 - used }).abs() < 1e-12);
}

#[test]
fn no_token_is_lost_and_no_document_is_crossed() {
    let shapes: [&[usize]; 6] = [&[], &[0, 0], &[5], &[3, 4, 2, 1], &[12, 1, 0, 7, 5, 23], &[4, 4, 4]];
    for lengths in shapes {
        for context in [1, 2, 4, 5, 8, 40] {
            let all = documents(lengths);
            check_rows(&Packed::concatenated(all.clone(), context).unwrap(), &all, context);
            for open in [1, 2, 8] {
                check_rows(&Packed::first_fit(all.clone(), context, open).unwrap(), &all, context);
                check_rows(&Packed::best_fit(all.clone(), context, open).unwrap(), &all, context);
            }
        }
    }
}

#[test]
fn concatenated_rows_are_the_text() {
    let packed = Packed::concatenated(documents(&[3, 4]), 5).unwrap();
    let [a, b] = [packed.get(0).unwrap(), packed.get(1).unwrap()];
    assert_eq!((a.tokens, a.segments, a.positions), (vec![1, 2, 3, 4, 5], vec![1, 1, 1, 2, 2], vec![0, 1, 2, 0, 1]));
    assert_eq!((a.targets, a.weights), (vec![2, 3, 0, 5, 6], vec![1.0, 1.0, 0.0, 1.0, 1.0]));
    assert_eq!((b.tokens, b.targets), (vec![6, 7, 0, 0, 0], vec![7, 0, 0, 0, 0]));
}

#[test]
fn rows_are_filled_as_they_say() {
    assert_eq!(first_fit(&[3, 3, 2, 2], 5, 1).unwrap(), [vec![0], vec![1, 2], vec![3]]);
    assert_eq!(first_fit(&[3, 3, 2, 2], 5, 2).unwrap(), [vec![0, 2], vec![1, 3]]);
    // The fullest row is closed where none has room.
    assert_eq!(first_fit(&[1, 4, 5], 5, 2).unwrap(), [vec![0, 1], vec![2]]);
    assert_eq!(first_fit(&[2, 4, 5, 3], 5, 2).unwrap(), [vec![1], vec![0, 3], vec![2]]);
    assert_eq!(best_fit(&[1, 2, 3, 4], 5, 4).unwrap(), [vec![0, 3], vec![1, 2]]);
    assert_eq!(best_fit(&[1, 2, 3, 4], 5, 2).unwrap(), [vec![0, 1], vec![3], vec![2]]);
    for fit in [first_fit, best_fit] {
        assert!(
            fit(&[6], 5, 1)
                .unwrap_err()
                .to_string()
                .contains("length is 6, and must be at most 5, which a row holds; it is length 0")
        );
        assert!(fit(&[1], 5, 0).unwrap_err().to_string().contains("number of open rows is 0"));
        assert!(fit(&[], 5, 1).unwrap().is_empty());
    }
    assert!(Packed::concatenated(documents(&[1]), 0).is_err());
}

#[test]
fn more_open_rows_pad_less() {
    let lengths: Vec<usize> = (0..500).map(|i| 1 + i * 7919 % 97).collect();
    let padding = |open| Packed::first_fit(documents(&lengths), 128, open).unwrap().padding();
    let best = Packed::best_fit(documents(&lengths), 128, 500).unwrap().padding();
    assert!(padding(1) > 0.2 && padding(8) < 0.1 && best < 0.01, "{} {} {best}", padding(1), padding(8));
}

#[test]
fn batches_know_where_sequences_begin() {
    let loader = Loader::new(Packed::concatenated(documents(&[3, 4, 1]), 5).unwrap()).batch(2).stack();
    let batch = loader.epoch(0).unwrap().next().unwrap().unwrap().data;
    assert_eq!(batch.cu_seqlens().unwrap(), [0, 3, 5, 7, 8, 10]);
    assert_eq!(batch.segments.to_vec::<i64>().unwrap(), [1, 1, 1, 2, 2, 1, 1, 2, 0, 0]);
    assert_eq!(batch.weights.dims(), [2, 5]);
    // A document that ends with its row and one that begins the next are two.
    let loader = Loader::new(Packed::concatenated(documents(&[5, 5]), 5).unwrap()).batch(2).stack();
    assert_eq!(loader.epoch(0).unwrap().next().unwrap().unwrap().data.cu_seqlens().unwrap(), [0, 5, 10]);
    let cpu = runtime_cpu::Cpu::new();
    let tensors = data::ToDevice::to_device(batch, &cpu).unwrap();
    assert_eq!(
        Array::from_tensor(&tensors.positions).unwrap().to_vec::<i64>().unwrap(),
        [0, 1, 2, 0, 1, 0, 1, 0, 0, 0]
    );
}
