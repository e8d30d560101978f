/*
 * The driver's library in guests without a driver: its checkpoint functions, which have the program itself do what it is
 * asked by a byte at the address "stand-in-PID". They need cuInit, which uses the device's files like the driver's.
 */
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100 };

static int is_initialized;

static int ask(int process, char what)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int length = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "stand-in-%d", process);
	int file = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	signed char answer = -1;

	if (file < 0)
		return -1;
	if (!connect(file, (void *)&address, offsetof(struct sockaddr_un, sun_path) + 1 + length) &&
	    write(file, &what, 1) == 1 && read(file, &answer, 1) != 1)
		answer = -1;
	close(file);
	return answer;
}

static int step(int process, char what)
{
	int answer = is_initialized ? ask(process, what) : NOT_INITIALIZED;

	return answer < 0 ? INVALID_VALUE : answer;
}

int cuInit(unsigned flags)
{
	is_initialized = !flags && open("/dev/nvidiactl", O_RDWR | O_CLOEXEC) >= 0;
	return is_initialized ? 0 : NO_DEVICE;
}

int cuCheckpointProcessGetState(int process, int *state)
{
	if (!is_initialized)
		return NOT_INITIALIZED;
	*state = ask(process, 'S');
	return *state < 0 ? INVALID_VALUE : 0;
}

int cuCheckpointProcessLock(int process, void *block) { return step(process, 'L'); }
int cuCheckpointProcessCheckpoint(int process, void *block) { return step(process, 'C'); }

/* Devices that others take the place of are noted by the last bytes of their UUIDs, for tests. */
int cuCheckpointProcessRestore(int process, void *block)
{
	struct { const unsigned char (*pairs)[2][16]; unsigned count; } *words = block;
	FILE *pairs = fopen("/tmp/pairs", "a");

	for (unsigned at = 0; pairs && at < words->count; at++)
		fprintf(pairs, "%x=%x\n", words->pairs[at][0][15], words->pairs[at][1][15]);
	if (pairs)
		fclose(pairs);
	return step(process, 'R');
}

int cuCheckpointProcessUnlock(int process, void *block) { return step(process, 'U'); }
