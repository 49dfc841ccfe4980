(** Shared shards (odb_ref/core/batching/shards.py): what ranks draw from one order. Spec: R14.

    A deal is a function of what all ranks want and of how many places are drawn so far. The theorems hold for every deal that gives out the
    next places, each to one rank. The shipped deal is proved to be such a deal, and to be even at the end. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists.
Import ListNotations.

(** ** Draws, for any deal *)

(** What rank [i] draws if [d] places are drawn so far: its share, which follows those of all lower ranks. *)
Definition draw (d : nat) (shares : list nat) (i : nat) : list nat := seq (d + sum (firstn i shares)) (nth i shares 0).

Definition ranks (w : nat) : list nat := seq 0 w.

Lemma sum_firstn_S : forall shares n, sum (firstn (S n) shares) = sum (firstn n shares) + nth n shares 0.
Proof.
  induction shares as [|x xs IH]; intros [|n]; try (simpl; lia). rewrite !firstn_cons. cbn [sum_over nth]. rewrite IH. lia.
Qed.

Lemma draws_of_the_first : forall n shares d, concat (map (draw d shares) (ranks n)) = seq d (sum (firstn n shares)).
Proof.
  induction n as [|n IH]; intros shares d; [reflexivity|]. unfold ranks in *. rewrite seq_S, map_app, concat_app, IH, sum_firstn_S, seq_app.
  cbn [map concat plus]. rewrite app_nil_r. reflexivity.
Qed.

Theorem draws_of_a_round_are_neighbours_in_the_order_of_the_ranks : forall shares d,
  concat (map (draw d shares) (ranks (length shares))) = seq d (sum shares).
Proof. intros shares d. rewrite draws_of_the_first, firstn_all. reflexivity. Qed.

Section Epoch.

(** [W] ranks, an order of [total] places, and any deal. For a round, from what each rank wants and how many places are drawn so far, [deal]
    gives the places that each rank draws. Together they are the next places. *)
Variables (W total : nat) (deal : nat -> (nat -> nat) -> nat -> nat -> list nat).
Definition dealt_out (k : nat) (wants : nat -> nat) (d : nat) : list nat := concat (map (deal k wants d) (ranks W)).
Hypothesis deal_next : forall k wants d, exists n, n <= total - d /\ Permutation (dealt_out k wants d) (seq d n).

(** How many places are drawn after these rounds, given what all ranks wanted in each. It does not depend on the rank. *)
Fixpoint drawn (rounds : list (nat -> nat)) : nat :=
  match rounds with
  | [] => 0
  | wants :: before => drawn before + length (dealt_out (length before) wants (drawn before))
  end.

(** What rank [i] has drawn in these rounds. The last round comes first. *)
Fixpoint drawn_by (i : nat) (rounds : list (nat -> nat)) : list nat :=
  match rounds with
  | [] => []
  | wants :: before => drawn_by i before ++ deal (length before) wants (drawn before) i
  end.

Lemma share_within : forall k wants d r, r < W -> length (deal k wants d r) <= length (dealt_out k wants d).
Proof.
  intros k wants d r H. unfold dealt_out. assert (I : In r (ranks W)) by (apply in_seq; lia). revert I. generalize (ranks W).
  induction l as [|q l IH]; intros []; cbn [map concat]; rewrite app_length; [subst; lia|]. specialize (IH H0). lia.
Qed.

Lemma dealt_within : forall k wants d, length (dealt_out k wants d) <= total - d.
Proof. intros k wants d. destruct (deal_next k wants d) as [n [L P]]. apply Permutation_length in P. rewrite seq_length in P. lia. Qed.

Theorem no_more_is_drawn_than_there_is : forall rounds, drawn rounds <= total.
Proof. induction rounds as [|wants before IH]; simpl; [lia|]. pose proof (dealt_within (length before) wants (drawn before)). lia. Qed.

Lemma each_gives : forall (A : Type) (f g : nat -> list A) w, (forall r, r < w -> Permutation (f r) (g r)) -> Permutation (concat (map f (seq 0 w))) (concat (map g (seq 0 w))).
Proof. intros A f g w H. apply concat_perms. intros r I. apply in_seq in I. apply H. lia. Qed.

Theorem every_place_dealt_is_drawn_once_by_one_rank : forall rounds,
  Permutation (concat (map (fun i => drawn_by i rounds) (ranks W))) (seq 0 (drawn rounds)).
Proof.
  induction rounds as [|wants before IH]; simpl.
  - induction (ranks W) as [|x l IHl]; simpl; [constructor|exact IHl].
  - eapply Permutation_trans; [apply concat_map_app|]. rewrite seq_app. apply Permutation_app; [exact IH|].
    destruct (deal_next (length before) wants (drawn before)) as [n [_ P]]. fold (dealt_out (length before) wants (drawn before)).
    rewrite (Permutation_length P), seq_length. exact P.
Qed.

Theorem no_place_is_drawn_twice : forall rounds, NoDup (concat (map (fun i => drawn_by i rounds) (ranks W))).
Proof. intros rounds. eapply Permutation_NoDup; [apply Permutation_sym, every_place_dealt_is_drawn_once_by_one_rank|apply seq_NoDup]. Qed.

(** If a rank that wants something gets a place, unless all that is left is dealt, the order ends while some rank wants something in each
    round: something is then drawn in each round until it ends. *)
Theorem the_order_ends_while_some_rank_wants :
  (forall k wants d r, r < W -> 1 <= wants r -> 1 <= length (deal k wants d r) \/ total <= d + length (dealt_out k wants d)) -> forall rounds,
  Forall (fun wants => exists r, r < W /\ 1 <= wants r) rounds -> Nat.min (length rounds) total <= drawn rounds.
Proof.
  intros deal_feeds. induction 1 as [|wants before [r [Hr Wr]] F IH]; [cbn; lia|]. cbn [drawn length]. pose proof (share_within (length before) wants (drawn before) r Hr).
  destruct (deal_feeds (length before) wants (drawn before) r Hr Wr); lia.
Qed.

(** DEAL, with COVER and ONCE: [emitted i] are the positions of its own input that rank [i] has emitted, each once. Its input is what it
    has drawn, in order (R14). If the order has ended, the job has emitted each sample of the order exactly once. *)
Theorem a_job_emits_each_sample_of_the_order_once : forall rounds emitted, drawn rounds = total ->
  (forall i, i < W -> Permutation (emitted i) (seq 0 (length (drawn_by i rounds)))) ->
  Permutation (concat (map (fun i => map (fun p => nth p (drawn_by i rounds) 0) (emitted i)) (ranks W))) (seq 0 total).
Proof.
  intros rounds emitted D E. rewrite <- D. eapply Permutation_trans; [|apply every_place_dealt_is_drawn_once_by_one_rank].
  apply each_gives. intros i Hi. rewrite (Permutation_map _ (E i Hi)), map_nth_all. reflexivity.
Qed.

End Epoch.

(** ** The shipped deal *)

(** The sum of what each rank wants beyond [v]. *)
Definition beyond (v : nat) (wants : list nat) : nat := sum_over (fun w => w - v) wants.

Definition top (wants : list nat) : nat := fold_right Nat.max 0 wants.

(** The least level, from [v] on, for which the places left are enough. *)
Fixpoint find_level (fuel v : nat) (wants : list nat) (left : nat) : nat :=
  match fuel with
  | 0 => v
  | S fuel' => if beyond v wants <=? left then v else find_level fuel' (S v) wants left
  end.

Definition level (wants : list nat) (left : nat) : nat := find_level (top wants) 0 wants left.

(** What each wants beyond [v], and one more for each that wants [v] or more, while there is [spare]. *)
Fixpoint give (v spare : nat) (wants : list nat) : list nat :=
  match wants with
  | [] => []
  | w :: ws => if (v <=? w) && (0 <? spare) then (w - v + 1) :: give v (spare - 1) ws else (w - v) :: give v spare ws
  end.

Definition shares (wants : list nat) (left : nat) : list nat :=
  if sum wants <=? left then wants else give (level wants left) (left - beyond (level wants left) wants) wants.

Definition count_from (v : nat) (wants : list nat) : nat := length (filter (fun w => v <=? w) wants).

Lemma beyond_0 : forall wants, beyond 0 wants = sum wants.
Proof. unfold beyond. induction wants as [|w ws IH]; simpl; [reflexivity|]. rewrite IH. lia. Qed.

Lemma beyond_step : forall v wants, beyond v wants = beyond (S v) wants + count_from (S v) wants.
Proof.
  unfold beyond, count_from. intros v. induction wants as [|w ws IH]; [reflexivity|].
  cbn [sum_over filter]. rewrite IH. destruct (S v <=? w) eqn:E; [apply Nat.leb_le in E|apply Nat.leb_gt in E]; simpl length; lia.
Qed.

Lemma beyond_top : forall wants v, top wants <= v -> beyond v wants = 0.
Proof.
  unfold beyond. induction wants as [|w ws IH]; intros v L; [reflexivity|].
  cbn [top fold_right] in L. fold (top ws) in L. cbn [sum_over]. rewrite IH by lia. lia.
Qed.

Lemma find_level_spec : forall fuel v wants left, beyond (v + fuel) wants <= left -> left < beyond 0 wants ->
  (v = 0 \/ left < beyond (v - 1) wants) ->
  let l := find_level fuel v wants left in beyond l wants <= left /\ 0 < l /\ left < beyond (l - 1) wants.
Proof.
  induction fuel as [|fuel IH]; intros v wants left B P Q; simpl.
  - rewrite Nat.add_0_r in B. destruct Q as [->|Q]; [lia|]. split; [exact B|]. split; [|exact Q].
    destruct v; [lia|lia].
  - destruct (beyond v wants <=? left) eqn:E; [apply Nat.leb_le in E|apply Nat.leb_gt in E].
    + destruct Q as [->|Q]; [lia|]. split; [exact E|]. split; [|exact Q]. destruct v; [lia|lia].
    + apply IH; [replace (S v + fuel) with (v + S fuel) by lia; exact B|exact P|].
      right. replace (S v - 1) with v by lia. exact E.
Qed.

Lemma level_spec : forall wants left, left < sum wants -> let v := level wants left in
  beyond v wants <= left /\ 0 < v /\ left < beyond (v - 1) wants.
Proof.
  intros wants left L. unfold level. apply find_level_spec; [|rewrite beyond_0; exact L|left; reflexivity].
  simpl. rewrite beyond_top by lia. lia.
Qed.

Lemma give_length : forall v wants spare, length (give v spare wants) = length wants.
Proof.
  intros v. induction wants as [|w ws IH]; intros spare; [reflexivity|].
  cbn [give]. destruct ((v <=? w) && (0 <? spare)); simpl; rewrite IH; reflexivity.
Qed.

Lemma give_sum : forall v wants spare, sum (give v spare wants) = beyond v wants + Nat.min spare (count_from v wants).
Proof.
  unfold beyond, count_from. intros v. induction wants as [|w ws IH]; intros spare; [simpl; lia|].
  cbn [give filter]. destruct (v <=? w); [destruct spare as [|spare]|]; cbn [andb Nat.ltb Nat.leb sum_over length]; rewrite IH; lia.
Qed.

Theorem shares_are_one_for_each_rank : forall wants left, length (shares wants left) = length wants.
Proof. intros wants left. unfold shares. destruct (_ <=? _); [reflexivity|apply give_length]. Qed.

Theorem shares_are_all_that_is_wanted_or_all_that_is_left : forall wants left,
  sum (shares wants left) = Nat.min (sum wants) left.
Proof.
  intros wants left. unfold shares. destruct (sum wants <=? left) eqn:E; [apply Nat.leb_le in E; lia|apply Nat.leb_gt in E].
  destruct (level_spec wants left E) as [B [P Q]]. set (v := level wants left) in *. rewrite give_sum.
  pose proof (beyond_step (v - 1) wants) as St. replace (S (v - 1)) with v in St by lia. lia.
Qed.

Lemma give_nth : forall v wants spare i, nth i (give v spare wants) 0 = nth i wants 0 - v \/
  (v <= nth i wants 0 /\ i < length wants /\ nth i (give v spare wants) 0 = nth i wants 0 - v + 1).
Proof.
  intros v. induction wants as [|w ws IH]; intros spare i; [left; destruct i; reflexivity|].
  cbn [give]. destruct ((v <=? w) && (0 <? spare)) eqn:E; destruct i as [|i]; cbn [nth length].
  - right. apply andb_prop in E. destruct E as [E _]. apply Nat.leb_le in E. split; [exact E|]. split; [lia|reflexivity].
  - destruct (IH (spare - 1) i) as [H|[H [L H']]]; [left; exact H|right; split; [exact H|split; [lia|exact H']]].
  - left. reflexivity.
  - destruct (IH spare i) as [H|[H [L H']]]; [left; exact H|right; split; [exact H|split; [lia|exact H']]].
Qed.

Theorem no_rank_draws_more_than_it_wants : forall wants left i, nth i (shares wants left) 0 <= nth i wants 0.
Proof.
  intros wants left i. unfold shares. destruct (sum wants <=? left) eqn:E; [lia|apply Nat.leb_gt in E].
  destruct (level_spec wants left E) as [_ [P _]]. set (v := level wants left) in *.
  destruct (give_nth v wants (left - beyond v wants) i) as [H|[H [_ H']]]; lia.
Qed.

(** The end is even: if not all ranks get what they want, no rank has room for more than one sample more left than a rank that has drawn. *)
Theorem the_last_places_leave_all_with_the_same_room_but_for_one : forall wants left i j, left < sum wants ->
  0 < nth j (shares wants left) 0 ->
  nth i wants 0 - nth i (shares wants left) 0 <= nth j wants 0 - nth j (shares wants left) 0 + 1.
Proof.
  intros wants left i j L S. unfold shares in *.
  replace (sum wants <=? left) with false in * by (symmetry; apply Nat.leb_gt; exact L).
  destruct (level_spec wants left L) as [_ [P _]]. set (v := level wants left) in *. set (spare := left - beyond v wants) in *.
  destruct (give_nth v wants spare i) as [Hi|[Gi [_ Hi]]]; destruct (give_nth v wants spare j) as [Hj|[Gj [_ Hj]]]; lia.
Qed.

Definition deal_in_turn (W total k : nat) (wants : nat -> nat) (d : nat) : nat -> list nat := draw d (shares (map wants (ranks W)) (total - d)).

Lemma dealt_in_turn : forall W total k wants d, dealt_out W (deal_in_turn W total) k wants d = seq d (Nat.min (sum (map wants (ranks W))) (total - d)).
Proof.
  intros W total k wants d. unfold dealt_out, deal_in_turn. rewrite draws_of_the_first, firstn_all2, shares_are_all_that_is_wanted_or_all_that_is_left; [reflexivity|].
  rewrite shares_are_one_for_each_rank, map_length. unfold ranks. rewrite seq_length. reflexivity.
Qed.

Theorem the_shipped_deal_meets_every_assumption : forall W total,
  (forall k wants d, exists n, n <= total - d /\ Permutation (dealt_out W (deal_in_turn W total) k wants d) (seq d n)) /\
  (forall k wants d r, r < W -> 1 <= wants r ->
    1 <= length (deal_in_turn W total k wants d r) \/ total <= d + length (dealt_out W (deal_in_turn W total) k wants d)).
Proof.
  intros W total. split; intros k wants d; rewrite dealt_in_turn; [eexists; split; [apply Nat.le_min_r|reflexivity]|].
  intros r H Wr. rewrite seq_length. unfold deal_in_turn, draw, shares. rewrite seq_length. destruct (_ <=? _) eqn:E; [left|right; apply Nat.leb_gt in E; lia].
  rewrite (nth_indep _ 0 (wants 0)) by (rewrite map_length; unfold ranks; rewrite seq_length; exact H). unfold ranks. rewrite map_nth, seq_nth by exact H. exact Wr.
Qed.

(** The theorems on an epoch, for the shipped deal. *)
Theorem with_the_shipped_deal_every_place_is_drawn_once_by_one_rank : forall W total rounds,
  let deal := deal_in_turn W total in
  Permutation (concat (map (fun i => drawn_by W deal i rounds) (ranks W))) (seq 0 (drawn W deal rounds)).
Proof. intros W total rounds deal. apply (every_place_dealt_is_drawn_once_by_one_rank W total deal), the_shipped_deal_meets_every_assumption. Qed.

Theorem with_the_shipped_deal_a_job_emits_each_sample_of_the_order_once : forall W total rounds emitted,
  let deal := deal_in_turn W total in drawn W deal rounds = total ->
  (forall i, i < W -> Permutation (emitted i) (seq 0 (length (drawn_by W deal i rounds)))) ->
  Permutation (concat (map (fun i => map (fun p => nth p (drawn_by W deal i rounds) 0) (emitted i)) (ranks W))) (seq 0 total).
Proof. intros W total rounds emitted deal. apply (a_job_emits_each_sample_of_the_order_once W total deal), the_shipped_deal_meets_every_assumption. Qed.

(** ** An update dealt by load (R16.4): drawn in a few portions, the later ones according to what each rank holds *)

(** How much of a portion each rank draws. [loads] are the tokens that each rank holds from the [p] places of the update drawn so far. *)
Definition portion_shares (loads : list nat) (p portion : nat) : list nat :=
  let held := map (fun l => Nat.div (l * p) (sum loads)) loads in
  shares (map (fun h => top held - h + portion) held) portion.

Theorem a_portion_is_dealt_out : forall loads p portion, loads <> [] ->
  length (portion_shares loads p portion) = length loads /\ sum (portion_shares loads p portion) = portion.
Proof.
  intros loads p portion Nn. unfold portion_shares. set (held := map _ loads). rewrite shares_are_one_for_each_rank, map_length. unfold held at 1. rewrite map_length.
  split; [reflexivity|]. rewrite shares_are_all_that_is_wanted_or_all_that_is_left. apply Nat.min_r.
  assert (Hn : held <> []) by (unfold held; destruct loads; easy). generalize (top held). intros m. destruct held as [|h hs]; [easy|]. simpl. lia.
Qed.

Lemma some_share_is_two : forall l i, i < length l -> nth i l 0 = 0 -> length l <= sum l -> exists j, 2 <= nth j l 0.
Proof.
  intros l i H Z Su. destruct (existsb (fun x => 2 <=? x) l) eqn:E.
  - apply existsb_exists in E as [x [I L]]. apply Nat.leb_le in L. apply (In_nth l x 0) in I as [j [_ <-]]. eauto.
  - exfalso. assert (A : forall j, nth j l 0 <= 1).
    { intros j. destruct (Nat.le_gt_cases (length l) j); [rewrite nth_overflow by assumption; lia|]. destruct (Nat.le_gt_cases (nth j l 0) 1) as [L|L]; [exact L|].
      exfalso. apply (Bool.eq_true_false_abs _) in E; [exact E|]. apply existsb_exists. exists (nth j l 0). split; [apply nth_In; assumption|apply Nat.leb_le; exact L]. }
    assert (B : forall k, sum (skipn k l) <= length (skipn k l)).
    { clear - A. induction l as [|x l IH]; intros [|k]; try (simpl; lia); [|apply IH; intros j; exact (A (S j))].
      specialize (IH (fun j => A (S j)) 0). pose proof (A 0). cbn [skipn sum_over length nth] in *. lia. }
    revert i H Z Su. clear E. induction l as [|x l IH]; intros i H Z Su; [simpl in H; lia|]. cbn [sum_over length] in *.
    pose proof (A 0) as A0. pose proof (B 1) as B1. simpl in A0, B1. destruct i as [|i]; simpl in Z; [lia|].
    apply (IH (fun j => A (S j)) (fun k => B (S k)) i); lia.
Qed.

Lemma a_first_portion_feeds_all : forall loads portion i, i < length loads -> length loads <= portion -> 1 <= nth i (portion_shares loads 0 portion) 0.
Proof.
  intros loads portion i H L. destruct (a_portion_is_dealt_out loads 0 portion) as [Ls S]; [intros ->; simpl in H; lia|]. unfold portion_shares in *.
  set (held := map _ loads) in *. set (wants := map _ held) in *.
  assert (Wn : forall j, j < length loads -> nth j wants 0 = portion).
  { intros j Hj. assert (Z : forall h, In h held -> h = 0) by (intros h I; apply in_map_iff in I as [x [<- _]]; rewrite Nat.mul_0_r; destruct (sum loads); [reflexivity|apply Nat.div_0_l; discriminate]).
    assert (T : top held = 0) by (clear - Z; induction held as [|h hs IH]; [reflexivity|]; simpl; rewrite (Z h (or_introl eq_refl)), IH; [reflexivity|intros x I; apply Z; right; exact I]).
    unfold wants. rewrite (nth_indep _ 0 (top held - 0 + portion)) by (unfold held; rewrite !map_length; exact Hj). rewrite (map_nth (fun h => top held - h + portion)), T. reflexivity. }
  destruct (nth i (shares wants portion) 0) eqn:E; [exfalso|lia].
  destruct (some_share_is_two (shares wants portion) i) as [j J]; [rewrite Ls; exact H|exact E|rewrite Ls, S; exact L|].
  assert (Hj : j < length loads) by (rewrite <- Ls; apply Nat.nle_gt; intros O; rewrite nth_overflow in J by exact O; lia).
  pose proof (no_rank_draws_more_than_it_wants wants portion j) as Le. rewrite (Wn j Hj) in Le.
  destruct (Nat.le_gt_cases (sum wants) portion) as [B|B].
  - unfold shares in E. apply Nat.leb_le in B. rewrite B, (Wn i H) in E. lia.
  - pose proof (the_last_places_leave_all_with_the_same_room_but_for_one wants portion i j B ltac:(lia)) as R. rewrite (Wn i H), (Wn j Hj), E in R. lia.
Qed.

Lemma an_empty_portion_gives_nothing : forall loads q i, nth i (portion_shares loads q 0) 0 = 0.
Proof.
  intros loads q i. unfold portion_shares. set (wants := map _ _). pose proof (shares_are_all_that_is_wanted_or_all_that_is_left wants 0) as S. rewrite Nat.min_0_r in S.
  revert i. induction (shares wants 0) as [|x l IH]; intros [|i]; simpl in *; try reflexivity; [lia|]. apply IH. lia.
Qed.

(** The rounds of updates: [n] places to an update, and [p] rounds. The first draws nothing, the last all that remains, and any other leaves
    one place in three. *)
Section Portions.
Variables (W n p total : nat).
Hypothesis some : 1 <= W.
Hypothesis rounds : 2 <= p.

(** The place at which update [u] begins, how many places the ranks draw together for round [k] if [d] are drawn, and how many are drawn
    before it. *)
Definition first_of (u : nat) : nat := Nat.min total (u * n).
Definition portion_of (k d : nat) : nat :=
  let left := first_of (S (k / p)) - d in if k mod p =? 0 then 0 else left - if S k mod p =? 0 then 0 else Nat.div left 3.
Fixpoint place (k : nat) : nat := match k with 0 => 0 | S j => place j + portion_of j (place j) end.

(** What rank [i] draws for round [k], whose ranks are told that they hold [loads k] tokens. *)
Definition by_load (loads : nat -> list nat) (k d i : nat) : list nat := draw d (portion_shares (loads k) (d - first_of (k / p)) (portion_of k d)) i.

Lemma next_round : forall k, S k mod p = 0 /\ k mod p <> 0 /\ S k / p = S (k / p) \/ S k mod p <> 0 /\ S k mod p = S (k mod p) /\ S k / p = k / p.
Proof.
  intros k. pose proof (Nat.div_mod k p ltac:(lia)) as D. pose proof (Nat.mod_upper_bound k p ltac:(lia)) as M.
  destruct (Nat.eq_dec (S (k mod p)) p) as [E|E]; [left|right].
  - assert (X : S k = S (k / p) * p) by lia. rewrite X, Nat.mod_mul, Nat.div_mul by lia. repeat split; lia.
  - rewrite <- (Nat.div_unique (S k) p (k / p) (S (k mod p))), <- (Nat.mod_unique (S k) p (k / p) (S (k mod p))) by lia. repeat split; lia.
Qed.

Theorem an_update_is_drawn_in_its_rounds : forall k,
  first_of (k / p) <= place k <= first_of (S (k / p)) /\ (k mod p = 0 -> place k = first_of (k / p)) /\ (S k mod p = 0 -> place (S k) = first_of (S (k / p))).
Proof.
  assert (Up : forall u, first_of u <= first_of (S u)) by (intros u; unfold first_of; simpl; lia).
  assert (Step : forall k, first_of (k / p) <= place k <= first_of (S (k / p)) -> place k <= place (S k) <= first_of (S (k / p)) /\ (S k mod p = 0 -> place (S k) = first_of (S (k / p)))).
  { intros k B. cbn [place]. unfold portion_of. destruct (Nat.eqb_spec (k mod p) 0) as [Z|Z].
    - split; [lia|]. intros S0. destruct (next_round k) as [[_ [Nz _]]|[Nz _]]; lia.
    - destruct (Nat.eqb_spec (S k mod p) 0); split; lia. }
  intros k. assert (B : first_of (k / p) <= place k <= first_of (S (k / p)) /\ (k mod p = 0 -> place k = first_of (k / p))).
  { induction k as [|k [IH _]]; [rewrite Nat.div_0_l by lia; cbn [place]; pose proof (Up 0); unfold first_of in *; simpl in *; lia|].
    destruct (Step k IH) as [S1 S2]. destruct (next_round k) as [[N1 [_ N2]]|[N1 [_ N2]]]; rewrite N2.
    - rewrite (S2 N1). pose proof (Up (S (k / p))). split; [lia|reflexivity].
    - split; [lia|contradiction]. }
  destruct B as [B1 B2]. split; [exact B1|]. split; [exact B2|]. apply (Step k B1).
Qed.

Variable loads : nat -> list nat.
Hypothesis one_each : forall k, length (loads k) = W.

Theorem portions_by_load_are_the_next_places : forall k d, Permutation (concat (map (by_load loads k d) (ranks W))) (seq d (portion_of k d)) /\ portion_of k d <= total - d.
Proof.
  intros k d. split; [|unfold portion_of, first_of; destruct (_ =? 0); lia].
  destruct (a_portion_is_dealt_out (loads k) (d - first_of (k / p)) (portion_of k d)) as [L S]; [intros Z; specialize (one_each k); rewrite Z in one_each; simpl in one_each; lia|].
  unfold by_load. rewrite <- (one_each k), <- L, draws_of_a_round_are_neighbours_in_the_order_of_the_ranks, S. reflexivity.
Qed.

(** With one portion, or at least three samples for each rank (R16.4), every rank draws some of an update, except of the last. *)
Theorem a_first_portion_by_load_feeds_every_rank : forall k i, W <= n -> p = 2 \/ 3 * W <= n -> k mod p = 0 -> i < W ->
  1 <= length (by_load loads (S k) (place (S k)) i) \/ total <= S (k / p) * n.
Proof.
  intros k i Hn C Z Hi. destruct (Nat.le_gt_cases total (S (k / p) * n)) as [L|L]; [right; exact L|left].
  destruct (next_round k) as [[_ [Nz _]]|[N1 [N2 N3]]]; [lia|]. destruct (an_update_is_drawn_in_its_rounds k) as [_ [B _]]. specialize (B Z).
  assert (E : place (S k) = first_of (k / p)) by (cbn [place]; unfold portion_of; rewrite Z; simpl; lia).
  unfold by_load, draw. rewrite seq_length, N3, E, Nat.sub_diag. apply a_first_portion_feeds_all; rewrite one_each; [exact Hi|].
  unfold portion_of. rewrite N2, Z, N3. change (1 =? 0) with false. cbv iota zeta. unfold first_of. rewrite !Nat.min_r by (simpl in *; lia).
  replace (S (k / p) * n - k / p * n) with n by (simpl; lia). destruct (Nat.eqb_spec (S (S k) mod p) 0) as [Y|Y]; [lia|].
  destruct C as [C|C]; [exfalso; destruct (next_round (S k)) as [[Y' _]|[_ [Y' _]]]; [contradiction|]; rewrite N2, Z in Y'; pose proof (Nat.mod_upper_bound (S (S k)) p ltac:(lia)); lia|].
  pose proof (Nat.div_le_upper_bound n 3 (n - W)). lia.
Qed.

End Portions.
