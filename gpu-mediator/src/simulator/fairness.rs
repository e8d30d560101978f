//! Fairness metrics: the ideal shares, and how far a measurement is from them (FairGV, section
//! 5.4.1).

/// The share that each client should get of a device with a capacity of one: in proportion to its
/// weight, but nobody gets more than it wants. What that leaves is distributed to the others by
/// weight.
pub fn ideal(weights: &[u32], wants: &[f64]) -> Vec<f64> {
    let mut given: Vec<Option<f64>> = vec![None; weights.len()];
    let mut capacity = 1.0;
    loop {
        let open = |given: &[Option<f64>]| -> Vec<usize> {
            (0..given.len()).filter(|&i| given[i].is_none()).collect()
        };
        let rest = open(&given);
        let total: f64 = rest.iter().map(|&i| f64::from(weights[i])).sum();
        let part = |i: usize| capacity * f64::from(weights[i]) / total;
        let content: Vec<usize> = rest
            .iter()
            .copied()
            .filter(|&i| wants[i] <= part(i))
            .collect();
        if content.is_empty() {
            for i in rest {
                given[i] = Some(part(i));
            }
            return given.into_iter().flatten().collect();
        }
        for i in content {
            given[i] = Some(wants[i]);
            capacity -= wants[i];
        }
    }
}

/// The Min-Max Ratio: the throughput of the client that got the least of its ideal, divided by that
/// of the client that got the most. One is fair.
pub fn min_max_ratio(measured: &[f64], ideal: &[f64]) -> f64 {
    let normal = || measured.iter().zip(ideal).map(|(got, should)| got / should);
    let least = normal().fold(f64::INFINITY, f64::min);
    let most = normal().fold(0.0, f64::max);
    if most > 0.0 { least / most } else { 1.0 }
}

/// The aggregated overhead: the total ideal throughput divided by the total measured throughput.
pub fn overhead(measured: &[f64], ideal: &[f64]) -> f64 {
    ideal.iter().sum::<f64>() / measured.iter().sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_light_client_leaves_goes_to_the_others_by_weight() {
        let shares = ideal(&[1, 2, 3], &[0.1, 1.0, 1.0]);
        for (share, should) in shares.iter().zip([0.1, 0.36, 0.54]) {
            assert!((share - should).abs() < 1e-9, "{shares:?}");
        }
    }

    #[test]
    fn nobody_is_given_more_than_it_wants() {
        assert_eq!(ideal(&[5, 1], &[0.2, 0.3]), [0.2, 0.3]);
    }

    #[test]
    fn the_ratio_is_one_when_all_get_their_part_however_small_the_whole() {
        assert!((min_max_ratio(&[0.1, 0.2], &[1.0, 2.0]) - 1.0).abs() < 1e-12);
        assert!((min_max_ratio(&[0.1, 0.1], &[0.1, 0.2]) - 0.5).abs() < 1e-12);
        assert!((overhead(&[0.4, 0.4], &[0.5, 0.5]) - 1.25).abs() < 1e-12);
    }
}
