/* The driver's functions that the launcher calls. They note each call, and execute kernels and graphs
   by callbacks, or answer each graph at once with tokens of 1. A test sets which call fails, how
   long each takes, and the state of all events. */
#include <stdint.h>
#include <time.h>

enum { GET_CONTEXT, SET_CONTEXT, LAUNCH_KERNEL, LAUNCH_GRAPH, CREATE_EVENT, DESTROY_EVENT,
       RECORD_EVENT, QUERY_EVENT, NUM_CALLS };

typedef void (*OnKernel)(uint64_t function, unsigned programs, unsigned threads, void** parameters);
typedef void (*OnGraph)(uint64_t graph);

static long counts[NUM_CALLS];
static int errors[NUM_CALLS];
static long costs_ns[NUM_CALLS];
static int event_state;
static uint64_t next_event;
static uint64_t context;
static OnKernel on_kernel;
static OnGraph on_graph;
static const int32_t* slot;  /* of the last kernel */
static int32_t* mail;
static long mail_words, flags_at;

void fake_reset(void) {
    for (int i = 0; i < NUM_CALLS; ++i) counts[i] = errors[i] = costs_ns[i] = 0;
    event_state = 600;
    context = 7;
    on_kernel = 0;
    on_graph = 0;
    mail = 0;
}
long fake_count(int call) { return __atomic_load_n(&counts[call], __ATOMIC_ACQUIRE); }
void fake_fail(int call, int error) { errors[call] = error; }
void fake_cost(int call, long ns) { costs_ns[call] = ns; }
void fake_events(int state) { __atomic_store_n(&event_state, state, __ATOMIC_RELEASE); }
void fake_context(uint64_t value) { context = value; }
void fake_callbacks(OnKernel kernel, OnGraph graph) { on_kernel = kernel; on_graph = graph; }

void fake_answers(int32_t* words, long slot_words, long at) {
    mail = words, mail_words = slot_words, flags_at = at;
}

/* Words 2 and 3 of a slot are the place in the mail and the ticket (step_inputs.py). */
static void answer(void) {
    int32_t* words = mail + slot[2] * mail_words;
    for (long i = 0; i < flags_at; ++i) words[i] = 1;
    for (long i = flags_at; i < mail_words; ++i) __atomic_store_n(&words[i], slot[3], __ATOMIC_RELEASE);
}

static long now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000L + at.tv_nsec;
}

static int note(int call) {
    __atomic_fetch_add(&counts[call], 1, __ATOMIC_ACQ_REL);
    if (costs_ns[call] > 0) {
        const long end = now_ns() + costs_ns[call];
        while (now_ns() < end) {}
    }
    return errors[call];
}

int cuCtxGetCurrent(void** found) {
    *found = (void*)context;
    return note(GET_CONTEXT);
}
int cuCtxSetCurrent(void* value) {
    (void)value;
    return note(SET_CONTEXT);
}
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned b,
                   unsigned c, unsigned shared, void* stream, void** parameters, void** extra) {
    (void)y, (void)z, (void)b, (void)c, (void)shared, (void)stream, (void)extra;
    const int error = note(LAUNCH_KERNEL);
    slot = *(const int32_t**)parameters[0];
    if (error == 0 && on_kernel) on_kernel((uint64_t)function, x, threads, parameters);
    return error;
}
int cuGraphLaunch(void* graph, void* stream) {
    (void)stream;
    const int error = note(LAUNCH_GRAPH);
    if (error == 0 && on_graph) on_graph((uint64_t)graph);
    if (error == 0 && mail) answer();
    return error;
}
int cuEventCreate(void** event, unsigned flags) {
    (void)flags;
    *event = (void*)++next_event;
    return note(CREATE_EVENT);
}
int cuEventDestroy_v2(void* event) {
    (void)event;
    return note(DESTROY_EVENT);
}
int cuEventRecord(void* event, void* stream) {
    (void)event, (void)stream;
    return note(RECORD_EVENT);
}
int cuEventQuery(void* event) {
    (void)event;
    const int error = note(QUERY_EVENT);
    return error ? error : __atomic_load_n(&event_state, __ATOMIC_ACQUIRE);
}
int cuGetErrorName(int error, const char** name) {
    if (error != 700) return 1;
    *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
    return 0;
}
